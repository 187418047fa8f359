"""Compiled CuTe host functions, kept on disk and loaded by later processes instead of compiled again.

An entry is two files, `<name>-<arch>-<key>.so` and a `.json` with what compiling found out (resources, warnings) and
the parts of its key. The key covers the version's source, the problem class, the tiling,
the architecture, the name of the host function, compile options, and what generates code: the compiler's packages, its
environment variables and this package's way of calling it. Entries are looked for in the cache
(`$XDG_CACHE_HOME/mla_var3/cute`) and in the bundles that are open (`mla_var3.toolchain.bundle`).

On a machine without the compiler an entry of a bundle counts whose key agrees in all but the compiler's packages, and
with it one that another point release of the compiler made, as of the release that a serving engine pins.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import hashlib
import json
import math
import os
import platform
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from mla_var3.errors import UserError, install
from mla_var3.toolchain import loader
from mla_var3.toolchain.compiled import CompiledKernel, Resources
from mla_var3.toolchain.digest import Code
from mla_var3.toolchain.source import import_closure, source_hash
from mla_var3.toolchain.versions import GENERATES, installed

if TYPE_CHECKING:
    from mla_var3.device import Device

SCHEMA = 1
BUNDLES = "MLA_VAR3_BUNDLES"  # environment: folders of open bundles, so that worker processes find them too
LOCK_TIMEOUT_S = 900.0

# Packages whose versions move the generated code or the runtime it calls.
PACKAGES = GENERATES["cute-dsl"]
# The compiler's variables, without those that change where it writes or what it prints.
_ENVIRONMENT = "CUTE_DSL_"
_HARMLESS = ("LIBS", "LOG_", "PRINT_", "KEEP", "DUMP_", "CACHE", "DISABLE_FILE_CACHING", "FILTER_", "JIT_TIME", "ARCH")


@dataclass(frozen=True)
class Key:
    """Everything a compiled host function depends on. toolchain: package or variable -> its version or value."""

    name: str
    source: str
    problem: str
    tiling: Mapping[str, Any] = field(hash=False)
    arch: str
    options: str = ""
    machine: str = field(default_factory=platform.machine)
    toolchain: Mapping[str, str] = field(default_factory=lambda: toolchain(), hash=False)

    @functools.cached_property
    def identity(self) -> str:
        """Hash of all parts but the toolchain: what a machine without the compiler can know."""
        return _digest({k: v for k, v in self.parts().items() if k != "toolchain"})

    @functools.cached_property
    def digest(self) -> str:
        return _digest(self.parts())

    @property
    def stem(self) -> str:
        return f"{loader.symbol_of(self.name)}-{self.arch}-{self.digest}"

    def parts(self) -> dict[str, Any]:
        return {f.name: _plain(getattr(self, f.name)) for f in fields(self)}


def _plain(value: Any) -> Any:
    return json.loads(json.dumps(value, default=str)) if isinstance(value, Mapping) else value


def _digest(data: Any) -> str:
    text = json.dumps([SCHEMA, data], sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:24]


def toolchain() -> dict[str, str]:
    """What generates code here: versions of installed packages, the compiler's variables, and how we call it."""
    found = dict(_installed())
    for name, value in os.environ.items():
        if name.startswith(_ENVIRONMENT) and not name.removeprefix(_ENVIRONMENT).startswith(_HARMLESS):
            found[name] = value
    return found


@functools.cache
def _installed() -> Mapping[str, str]:
    found = installed(PACKAGES)
    recipe = ("cute", "digest", "loader", "loops", "resources", "sass", "spills")
    here = [Path(__file__).with_name(f"{name}.py").read_bytes() for name in recipe]
    found["recipe"] = hashlib.sha256(b"".join(here)).hexdigest()[:12]
    found["tvm-ffi-abi"] = loader.tvm_ffi_abi()
    return found


def make_key(source: str, problem_class: Any, tiling: Any, device: Device, name: str, options: str = "") -> Key:
    """The key of a host function. source: hash of the version's source."""
    problem = problem_class.key() if hasattr(problem_class, "key") else str(problem_class)
    return Key(name, source, problem, code_knobs(tiling), device.arch, options)


def code_knobs(tiling: Any) -> dict[str, Any]:
    """The fields of a tiling that code is made for: all but those its class lists in `launch_fields`.

    A knob that is a mere launch argument (the number of splits, say) would otherwise have the same code compiled for
    each of its values.
    """
    record = tiling.to_record() if hasattr(tiling, "to_record") else dict(tiling or {})
    return {name: value for name, value in record.items() if name not in getattr(tiling, "launch_fields", ())}


# ---------------------------------------------------------------- the two ways in
class CompileCache(dict[Any, Any]):
    """What the plans that share it have compiled in this process, under keys that hold everything the code depends on.

    folder: where host functions are kept on disk; `default_cache_dir()` unless given. making: a bundle is made: open
    bundles are not looked at, and whatever goes to the folder is noted in `entries`.
    """

    def __init__(self, folder: Path | None = None, *, making: bool = False) -> None:
        super().__init__()
        self.folder = folder
        self.making = making
        self.entries: list[dict[str, Any]] = []

    def part(self, name: str) -> CompileCache:
        """The cache of a version that the plan's own is made of; what a bundle makes is noted in both."""
        if name not in self:
            part = CompileCache(self.folder, making=self.making)
            part.entries = self.entries
            self[name] = part
        found: CompileCache = self[name]
        return found


class Planned(Protocol):
    """What compiling needs to know of a plan."""

    problem: Any
    tiling: Any
    device: Device | None
    compiled: CompileCache

    def code_class(self, problem: Any) -> Any: ...


def compiled_host(
    plan: Planned,
    name: str,
    compile_fn: Callable[..., CompiledKernel],
    *,
    tiling: Any = None,
    device: Device | None = None,
    options: str = "",
) -> CompiledKernel:
    """The host function `name` of a plan, loaded: `.handle(*arguments)` launches it. Compiled only if nobody has.

    compile_fn(tiling, device): compiles it, as `CuteKernel` takes it. Within a plan a name stands for one piece of
    code for its `code_class` and a tiling's `code_knobs`: where something else decides (a constant made of b or t), put
    it into the name. tiling, device: the plan's unless given; without any device it is the GPU here.
    """
    from mla_var3.device import Device

    device = device or plan.device or Device.detect()
    if device is None:
        raise UserError(f"{name} was planned for no device, and there is no GPU here: give the plan a device.")
    tiling = plan.tiling if tiling is None else tiling
    code_class = plan.code_class(plan.problem)
    memo = ("host", name, code_class, tuple(code_knobs(tiling).items()), device.arch, options)
    if memo not in plan.compiled or plan.compiled.making:
        plan.compiled[memo] = load_or_compile(
            source_of(plan),
            code_class,
            tiling,
            device,
            name,
            lambda: compile_fn(tiling, device),
            plan.compiled,
            options=options,
        )
    return plan.compiled[memo]


def load_or_compile(
    source: Source | Path | str,
    problem_class: Any,
    tiling: Any,
    device: Device,
    name: str,
    compile_fn: Callable[[], CompiledKernel],
    cache: CompileCache | None = None,
    *,
    options: str = "",
) -> CompiledKernel:
    """A compiled host function with its `handle` loaded, from the cache or an open bundle, else from `compile_fn()`.

    source: of the version: its file, or a hash. compile_fn returns a `CompiledKernel` whose handle is what
    `cute.compile` made with TVM-FFI; it is kept under the key of the other arguments. Two processes that want the same
    compile it once. A cache that cannot be written costs a warning, a damaged entry is made again. Where the compiler
    is missing and no bundle has the function, raises `UserError` that says what differs.
    """
    cache = cache if cache is not None else CompileCache()
    if isinstance(source, Path):
        source = source_of_file(source)
    elif isinstance(source, str):
        source = Source(source)
    key = make_key(source.hash, problem_class, tiling, device, name, options)
    if not cache.making:
        found = _from_bundles(key)
        if found is not None:
            return found
        if not loader.compiler_here():
            raise UserError(_why_missing(key))
    elif not loader.compiler_here():
        raise UserError(f"making a bundle needs the compiler: {install('cute')}.")
    if not source.settled:
        if cache.making:
            raise UserError(f"the source of {name} changed after this process started: start again.")
        _warn_once("source", "what is compiled from a source that changed after this process started is not kept")
        return compile_fn()
    store = Store(cache.folder or default_cache_dir())
    found = store.load(key)
    if found is None:
        with store.lock(key):
            found = store.load(key) or store.keep(key, compile_fn(), strict=cache.making)
    if cache.making:
        entry = read_entry(store.folder / f"{key.stem}.json")
        assert entry is not None
        cache.entries.append(entry)
    return found


# ---------------------------------------------------------------- source
@dataclass(frozen=True)
class Source:
    """Hash of a version's source. settled: no file of it is newer than this process.

    A process that imported a version before it was edited would otherwise keep the old code under the new source.
    """

    hash: str
    settled: bool = True


def source_of(plan: Any) -> Source:
    """The source of a plan's version: the import closure of the file that defines it."""
    file = getattr(sys.modules.get(type(plan).__module__), "__file__", None)
    if file is None:  # typed into an interpreter: nothing to know it by in another process
        return Source("", settled=False)
    return source_of_file(Path(file))


def source_of_file(file: Path) -> Source:
    """The source of the version that a file defines."""
    return Source(source_hash(file), _older_than_process(import_closure(file)))


def _older_than_process(paths: Sequence[Path]) -> bool:
    return max(path.stat().st_mtime for path in paths) <= _process_start()


@functools.cache
def _process_start() -> float:
    """When this process started, as file times are told, or up to a second earlier; infinity where nothing says so."""
    try:
        boot = next(line for line in Path("/proc/stat").read_text().splitlines() if line.startswith("btime"))
        ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
        after_boot = ticks / os.sysconf("SC_CLK_TCK")
        rough = int(boot.split()[1]) + after_boot  # whole seconds, cut off
        exact = time.time() - float(Path("/proc/uptime").read_text().split()[0]) + after_boot
    except (OSError, StopIteration, ValueError, IndexError):
        return math.inf
    # A container may be told an uptime of its own, and clocks are set: then they disagree.
    return exact - 0.02 if rough <= exact <= rough + 1.5 else rough


# ---------------------------------------------------------------- entries on disk
def default_cache_dir() -> Path:
    """Where compiled host functions are kept unless a caller says otherwise."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "mla_var3" / "cute"


class Store:
    """A folder of entries. Reading never raises; a file that does not match its hash counts as absent."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def load(self, key: Key) -> CompiledKernel | None:
        entry = read_entry(self.folder / f"{key.stem}.json")
        if entry is None or entry.get("key") != key.digest:
            return None
        try:
            return load_entry(self.folder, entry)
        except (OSError, ValueError, KeyError, TypeError):  # torn, or linked against another runtime: made again
            return None

    def keep(self, key: Key, compiled: CompiledKernel, *, strict: bool = False) -> CompiledKernel:
        """Writes an entry and returns it loaded; what cannot be written is returned as it is, or raised if `strict`."""
        if not hasattr(compiled.handle, "export_to_c"):
            if strict:
                raise UserError(f"{key.name} was not compiled with TVM-FFI, so it cannot be kept: use compile_cute.")
            return compiled
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            library = self._beside(f"{key.stem}.so", lambda path: loader.link(compiled.handle, key.name, path))
            text = json.dumps(entry_of(key, compiled, library), indent=1)
            self._beside(f"{key.stem}.json", lambda path: path.write_text(text))
        except (OSError, loader.CannotLink) as error:
            if strict:
                raise UserError(f"{self.folder} cannot hold compiled kernels: {error}") from error
            _warn_once("keep", f"compiled kernels are not kept in {self.folder}: {error}")
            return compiled
        loaded = self.load(key)
        if loaded is None and strict:
            raise UserError(f"{key.name} was compiled for {key.arch}, but what was kept of it does not load.")
        return replace(loaded, artefacts={**compiled.artefacts, **loaded.artefacts}) if loaded else compiled

    def _beside(self, name: str, write: Callable[[Path], Any]) -> Path:
        """Writes under another name and renames, so that readers see all of a file or none."""
        descriptor, path = tempfile.mkstemp(dir=self.folder, suffix=".tmp")
        os.close(descriptor)
        try:
            write(Path(path))
            os.chmod(path, 0o644)
            os.replace(path, self.folder / name)
        finally:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)
        return self.folder / name

    @contextlib.contextmanager
    def lock(self, key: Key) -> Iterator[None]:
        """Held by the one process that compiles. The system drops it with its holder, so none is ever stale."""
        descriptor = self._acquire(self.folder / f"{key.stem}.lock")
        try:
            yield
        finally:
            if descriptor is not None:
                with contextlib.suppress(OSError):
                    os.unlink(self.folder / f"{key.stem}.lock")
                os.close(descriptor)

    def _acquire(self, path: Path) -> int | None:
        """None where there is no locking, or when the holder takes implausibly long: then both compile."""
        deadline = time.monotonic() + LOCK_TIMEOUT_S
        while time.monotonic() < deadline:
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                descriptor = os.open(path, os.O_CREAT | os.O_RDWR, 0o644)
            except OSError:
                return None
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if os.fstat(descriptor).st_ino == os.stat(path).st_ino:
                    return descriptor
            except (BlockingIOError, FileNotFoundError):
                pass  # held by another; or its holder removed the file in between, and another one counts now
            except OSError:
                os.close(descriptor)
                return None
            os.close(descriptor)
            time.sleep(0.02)
        return None


def entry_of(key: Key, compiled: CompiledKernel, library: Path) -> dict[str, Any]:
    """What the `.json` of an entry says."""
    data = library.read_bytes()
    return {
        "schema": SCHEMA,
        "key": key.digest,
        "identity": key.identity,
        **key.parts(),
        "object": library.name,
        "sha256": hashlib.sha256(data).hexdigest(),
        "bytes": len(data),
        "compiled": to_json(compiled),
        "at": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def read_entry(path: Path) -> dict[str, Any] | None:
    """The content of an entry's `.json`; None when there is none that can be read."""
    try:
        entry = json.loads(path.read_text())
    except (OSError, ValueError):
        return None
    return entry if isinstance(entry, dict) and entry.get("schema") == SCHEMA else None


def load_entry(folder: Path, entry: Mapping[str, Any]) -> CompiledKernel:
    """Loads an entry's library; raises `ValueError` when its hash is not the one noted, or it does not load."""
    path = folder / entry["object"]
    if hashlib.sha256(path.read_bytes()).hexdigest() != entry["sha256"]:
        raise ValueError(f"{path} is damaged: its hash is not the one noted when it was made")
    try:
        handle = loader.load(path, entry["name"], near=bundle_dirs())
    except (RuntimeError, AttributeError, OSError) as error:
        raise ValueError(f"{path} does not load ({str(error).splitlines()[-1][:200]})") from error
    compiled = from_json(entry["compiled"])
    return replace(compiled, handle=handle, artefacts={"object": path})


def to_json(compiled: CompiledKernel) -> dict[str, Any]:
    """What `from_json` makes a compiled kernel of, without its handle and artefacts."""
    return {
        "name": compiled.name,
        "arch": compiled.arch,
        "resources": compiled.resources.to_record(),
        "warnings": list(compiled.warnings),
        "seconds": compiled.seconds and round(compiled.seconds, 3),
        "stages": [to_json(stage) for stage in compiled.stages],
        "code": compiled.code.to_record() if compiled.code else None,
    }


def from_json(data: Mapping[str, Any]) -> CompiledKernel:
    """Inverse of `to_json`."""
    known = {f.name for f in fields(Resources)}
    resources = Resources(**{name: value for name, value in data["resources"].items() if name in known})
    stages = tuple(from_json(stage) for stage in data["stages"])
    code = Code.from_record(data["code"]) if data.get("code") else None
    return CompiledKernel(
        data["name"], data["arch"], resources, {}, stages, tuple(data["warnings"]), data["seconds"], code
    )


_warned: set[str] = set()


def _warn_once(kind: str, message: str) -> None:
    if kind not in _warned:
        _warned.add(kind)
        warnings.warn(message, RuntimeWarning, stacklevel=3)


# ---------------------------------------------------------------- bundles
def bundle_dirs() -> list[Path]:
    """Folders of the open bundles."""
    return [Path(part) for part in os.environ.get(BUNDLES, "").split(os.pathsep) if part]


def usable(language: str) -> bool:
    """Whether versions of a language run here without their compiler: those of CuTe, once a bundle is open."""
    return language == "cute-dsl" and bool(bundle_dirs())


def _from_bundles(key: Key) -> CompiledKernel | None:
    compiler = loader.compiler_here()
    for folder in bundle_dirs():
        for entry in entries_of(folder):
            if entry["key"] != key.digest and (entry["identity"] != key.identity or _clashes(entry, key)):
                continue
            try:
                return load_entry(folder / "objects", entry)
            except (OSError, ValueError) as error:
                if not compiler:
                    raise UserError(f"{error}: copy the bundle again, or make it again.") from error
                _warn_once("bundle", f"{error}; compiling instead")
    return None


def entries_of(folder: Path) -> list[dict[str, Any]]:
    """The entries of a bundle's manifest; a `UserError` when it has none that can be read."""
    path = folder / "manifest.json"
    try:
        stat = path.stat()
    except OSError as error:
        raise UserError(f"{folder} is no bundle: {path} cannot be read ({error.strerror}).") from error
    return _entries(path, stat.st_mtime_ns, stat.st_size)


@functools.lru_cache(maxsize=32)
def _entries(path: Path, mtime_ns: int, size: int) -> list[dict[str, Any]]:
    try:
        manifest = json.loads(path.read_text())
        schema, entries = manifest["schema"], manifest["entries"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path} is damaged ({error}): make the bundle again.") from error
    if schema != SCHEMA:
        raise UserError(f"{path} has the form {schema}, and this version reads {SCHEMA}: make the bundle again.")
    return list(entries)


def _clashes(entry: Mapping[str, Any], key: Key) -> list[str]:
    """Where an entry's toolchain contradicts what is installed; what is not installed contradicts nothing, and another
    point release of the compiler does not either. Where the compiler is here, all else that it is given must agree."""
    made, here = entry["toolchain"], key.toolchain
    names = {*PACKAGES, "tvm-ffi-abi"}
    clashes = [n for n in sorted(names) if here.get(n) and _series(here[n]) != _series(made.get(n, ""))]
    if loader.compiler_here():
        clashes += [n for n in sorted({*made, *here} - names) if made.get(n) != here.get(n)]
    return [f"{n} {made.get(n)} (here {here.get(n)})" for n in clashes]


def _series(version: str) -> list[str]:
    """The releases that a version is a point release of."""
    return version.split(".")[:2]


def _why_missing(key: Key) -> str:
    """One sentence: no compiler, and how the nearest entry of the open bundles differs."""
    what = f"{key.name} for {key.arch}, {key.problem}, {dict(key.tiling) or 'no tiling'}"
    how = f"install the compiler ({install('cute')}) or make a bundle with it"
    folders = bundle_dirs()
    if not folders:
        return f"{what} is not compiled: the CuTe compiler is not installed and no bundle is open; {how}."
    parts = key.parts()
    nearest: tuple[int, str] | None = None
    for entry in (e for folder in folders for e in entries_of(folder)):
        if entry["name"] != key.name:
            continue
        differing = [n for n in ("source", "problem", "tiling", "arch", "options", "machine") if entry[n] != parts[n]]
        shown = [f"{n} {entry[n]}" for n in differing] or _clashes(entry, key)
        if nearest is None or len(differing) < nearest[0]:
            nearest = (len(differing), ", ".join(shown))
    close = f"the nearest has {nearest[1]}" if nearest else f"it holds no {key.name}"
    return f"{what} is not in the open bundle, and the CuTe compiler is not installed; {close}; {how}."
