"""Finds designs and versions by walking the packages; there is no list to keep.

Walking looks at files and folders only, so listing imports no kernel language. A version lives at
`<language>/<layer>/<design>/<design>[_vN]/<design>[_vN].py`. Other people's libraries share files,
`peer/<layer>[_<family>].py`, in which a class with `peer = "<design>"` is the plan of one. A module is imported when a
plan of it is asked for.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache, cached_property
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mla_var3 import paths
from mla_var3.catalogue.retired import where_is
from mla_var3.errors import UserError, importable, install, nearest
from mla_var3.names import kernel_label, version_name
from mla_var3.toolchain import source
from mla_var3.toolchain.mistakes import NEW_PAGE
from mla_var3.toolchain.versions import too_old

if TYPE_CHECKING:
    from mla_var3.runtime.plan import KernelPlan


@dataclass(frozen=True)
class Interpreter:
    """What runs a language's kernels on a CPU. module: must be importable. env: of the process."""

    name: str
    module: str
    env: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Language:
    """folder: of its package. package: must be importable. how: to get it. compiled: whether its kernels are compiled
    here. interpreter: None where nothing runs its kernels on a CPU, for which `gpu_only` gives the reason."""

    folder: str
    package: str
    how: str
    compiled: bool = True
    interpreter: Interpreter | None = None
    gpu_only: str = ""


#: The language of other people's libraries.
PEER = "peer"
#: By public name. The one place that says of a language where it is, whether it is compiled and where it runs.
LANGUAGES: dict[str, Language] = {
    "torch": Language(
        "torch", "torch", "pip install torch", compiled=False, interpreter=Interpreter("torch on the CPU", "torch")
    ),
    "triton": Language(
        "triton",
        "triton",
        "pip install 'triton>=3.6'",
        interpreter=Interpreter("Triton's interpreter", "triton", {"TRITON_INTERPRET": "1"}),
    ),
    "cutile-dsl": Language(
        "cutile",
        "cuda.tile",
        install("cutile"),
        interpreter=Interpreter("the cuTile interpreter", "mla_var3.cutile_cpu"),
    ),
    "cute-dsl": Language(
        "cute_python",
        "cutlass",
        install("cute"),
        gpu_only="CuTe DSL has no interpreter: its kernels are compiled only",
    ),
    # Other people's libraries. Each is optional and found by itself: `missing(kernel)` says which one is not here.
    PEER: Language("peer", "torch", "pip install torch", compiled=False, gpu_only="peer kernels do not run on a CPU"),
}


def is_compiled(language: str) -> bool:
    """Whether a language's kernels are compiled here; torch has none, and libraries come compiled."""
    return LANGUAGES[language].compiled


def cannot_run_on_cpu(language: str) -> str:
    """ "" when kernels of the language run on a CPU here, else why not."""
    known = LANGUAGES[language]
    if known.interpreter is None:
        return known.gpu_only
    for package in (known.interpreter.module, known.package):
        if not importable(package):
            return f"{known.interpreter.name} needs {package}, which is not installed"
    return ""


@dataclass(frozen=True, order=True)
class KernelId:
    """Names one version: language, layer, design, and a version number (0 is the base)."""

    language: str
    layer: str
    design: str
    version: int = 0

    @property
    def module_name(self) -> str:
        """`flash_mla` for the base version, `flash_mla_v2` for version 2."""
        return version_name(self.design, self.version)

    @property
    def module(self) -> str:
        folder = LANGUAGES[self.language].folder
        if self.language == PEER:
            return f"mla_var3.kernel.{folder}.{_peers().get((self.layer, self.design), self.layer)}"
        return f"mla_var3.kernel.{folder}.{self.layer}.{self.design}.{self.module_name}.{self.module_name}"

    @property
    def path(self) -> Path:
        """The version's source file; where it would be in the package when there is none."""
        names = self.module.split(".")[2:]
        places = [folder.joinpath(*names).with_suffix(".py") for folder in paths.kernel_dirs()]
        return next((place for place in places if place.is_file()), places[0])

    @property
    def workload(self) -> str:
        """The workload that its plan names, read from its file, so that no language is imported; empty where its file
        does not say, and for libraries, of which several share a file."""
        return "" if self.language == PEER else source.workload(self.path)

    @cached_property
    def label(self) -> str:
        """`cute-dsl/flash_mla` or `cute-dsl/flash_mla_v2`: how users name a version."""
        return kernel_label(self.language, self.design, self.version)

    def to_record(self) -> dict[str, Any]:
        return {"language": self.language, "layer": self.layer, "design": self.design, "version": self.version}

    @classmethod
    def from_record(cls, fields: Mapping[str, Any]) -> KernelId:
        """The version that a record's `kernel` names; what else stands there is passed over."""
        return cls(fields["language"], fields["layer"], fields["design"], fields["version"])

    @classmethod
    def parse(cls, text: str) -> KernelId:
        """The version that `language/design[_vN]` names; a `UserError` says where a retired one is, and names the
        nearest when there is none."""
        found = {k.label: k for k in all_kernels()}
        if text not in found:
            if (sentence := where_is(text)) is not None:
                raise UserError(sentence)
            raise UserError(f"no kernel {text!r}: {nearest(text, found)}.")
        return found[text]


@cache
def all_kernels() -> tuple[KernelId, ...]:
    """Every version in the package and in the user's own folder, sorted."""
    found = {KernelId(PEER, layer, design) for layer, design in _peers()}
    for language, known in LANGUAGES.items():
        for path in (file for root in paths.kernel_dirs() for file in (root / known.folder).glob("*/*/*/*.py")):
            layer, design, name = path.parts[-4], path.parts[-3], path.parts[-2]
            match = re.fullmatch(re.escape(design) + r"(?:_v(\d+))?", name)
            if layer != "prims" and match and path.stem == name:
                found.add(KernelId(language, layer, design, int(match[1] or 0)))
    return tuple(sorted(found))


# Not parsed: the peers of a file with a mistake in it are still listed, and loading one says where the mistake is.
_PLAN_OF_A_PEER = re.compile(r'^    peer = "(\w+)"$', re.MULTILINE)


@cache
def _peers() -> dict[tuple[str, str], str]:
    """Layer and design of every peer -> the name of the file that has its plan."""
    found = {}
    for root in paths.kernel_dirs():
        for path in sorted((root / LANGUAGES[PEER].folder).glob("*.py")):
            for design in _PLAN_OF_A_PEER.findall(path.read_text(encoding="utf-8")):
                found[path.stem.partition("_")[0], design] = path.stem
    return found


def _add_own_folders(module: str) -> None:
    """Makes a module importable that lies in the user's own folder: its packages look there too."""
    names = module.split(".")[:-1]
    for depth in range(2, len(names) + 1):
        package: Any = import_module(".".join(names[:depth]))
        for root in paths.kernel_dirs()[1:]:
            folder = str(root.joinpath(*names[2:depth]))
            if folder not in package.__path__:
                package.__path__.append(folder)


def standings() -> dict[str, str]:
    """`newest`, `kept` or `new` for each version that is here, by its label. A version is new while it has no entry in
    `devlogs`, as a clone; in an installed package, which has no devlogs, none is. Of a language, layer and design, the
    one with the highest number that is not new is the newest, unless that number is 0. The others are kept. A library
    has no standing."""
    root = paths.repo_root()

    def begun(kernel: KernelId) -> bool:
        entry = f"{kernel.language}-v{kernel.version}.md"
        return root is not None and not (root / "devlogs" / kernel.design / entry).is_file()

    own = [k for k in all_kernels() if k.language != PEER]
    last = {(k.language, k.layer, k.design): k for k in own if not begun(k)}  # they come sorted
    newest = {k for k in last.values() if k.version}
    return {k.label: "new" if begun(k) else "newest" if k in newest else "kept" for k in own}


def missing(what: str | KernelId) -> str | None:
    """Why a language, or one version, cannot be used here and how to get it, in one sentence; None when it can.

    A language is asked for what all its versions need; a peer's version also for the library that it wraps. A compiler
    that is too old is worse than none: no bundle is taken beside it.
    """
    if isinstance(what, KernelId):
        reason = missing(what.language)
        if reason is None and what.language == PEER:
            from mla_var3.catalogue.libraries import absent

            reason = absent(what.design)
        return reason
    language = what
    package, how = LANGUAGES[language].package, LANGUAGES[language].how
    found = importable(package)
    if found and (old := too_old(language)) is not None:
        return f"{language} needs {old}: {how}, or uninstall it and give a bundle."
    if not found:
        from mla_var3.toolchain import aot

        found = aot.usable(language)  # an open bundle needs no compiler
    return None if found else f"{language} needs the package {package}, which is not installed: {how}."


def library_versions() -> dict[str, str]:
    """Which build of each wrapped library is here, by the peer's design."""
    from mla_var3.catalogue.libraries import versions

    return versions()


def get_plan(kernel: KernelId) -> type[KernelPlan]:
    """The plan class of a version. Raises `UserError` when its language is not installed."""
    reason = missing(kernel.language)
    if reason:
        raise UserError(reason)
    from mla_var3.runtime.plan import KernelPlan
    from mla_var3.toolchain.without_compiler import import_version

    if not kernel.path.is_relative_to(paths.kernel_dirs()[0]):
        _add_own_folders(kernel.module)
    module = import_version(kernel.module) if kernel.language == "cute-dsl" else import_module(kernel.module)
    plans = [
        value
        for value in vars(module).values()
        if isinstance(value, type) and value.__module__ == module.__name__ and issubclass(value, KernelPlan)
        if kernel.language != PEER or vars(value).get("peer") == kernel.design
    ]
    if len(plans) != 1:
        which = f" with peer = {kernel.design!r}" if kernel.language == PEER else ""
        raise UserError(
            f"{kernel.path.name} must define exactly one KernelPlan subclass{which}; it defines {len(plans)}."
        )
    lacks = [name for name in ("workload", "tiling_type", "requires") if not hasattr(plans[0], name)]
    if lacks := [*lacks, *sorted(plans[0].__abstractmethods__)]:
        raise UserError(
            f"{plans[0].__name__} in {kernel.path.name} lacks {', '.join(lacks)}: {NEW_PAGE} has a whole plan, with "
            "what each of them is for."
        )
    return plans[0]


def label_of(plan: KernelPlan) -> str:
    """The label of a plan's version."""
    module, peer = type(plan).__module__, getattr(plan, "peer", None)
    return next(k.label for k in all_kernels() if k.module == module and peer in (None, k.design))


def source_files(kernel: KernelId) -> list[Path]:
    """The version's import closure: what its source hash covers, with the same of its `parts`."""
    return source.import_closure(kernel.path)


def _said(kernel: KernelId, name: str) -> list[str]:
    """What the version's plan declares under a name, read without importing it."""
    said = [one for one in source.declarations(kernel.path) if one.get("peer", kernel.design) == kernel.design]
    return [value for one in said for value in one.get(name, ())]


def parts(kernel: KernelId) -> list[KernelId]:
    """The versions that a pipeline's plan declares as its `parts`; none of any other."""
    return sorted({KernelId.parse(label) for label in _said(kernel, "parts")})


def uses(kernel: KernelId) -> list[str]:
    """The techniques that the version states to have: names of pages in docs/knowledge/optimizations."""
    return _said(kernel, "uses")


def source_hash(kernel: KernelId) -> str:
    """SHA-256 (16 hex digits) over names and contents of `source_files`; of a pipeline, of those of its parts too."""
    hashes = [source.source_hash(version.path) for version in (kernel, *parts(kernel))]
    return hashes[0] if len(hashes) == 1 else hashlib.sha256("".join(hashes).encode()).hexdigest()[:16]
