#!/usr/bin/env python3
"""Gets other people's libraries from the package index, for a GPU machine that reaches no index.

    scripts/fetch_peers.py                                     what the index alone can give, into out/peers
    scripts/fetch_peers.py fa3_qv fa4 --pack out/peers.tar.xz  two of them, and one archive to carry over

On the machine with the GPU:

    mkdir -p /tmp/peers && tar xJf peers.tar.xz -C /tmp/peers && . /tmp/peers/activate
    mla-var3 list          # the peers that are found have no remark beside them

Only what is used is kept: shared objects out of wheels, and pure Python packages. Every wheel is pinned, with its
SHA-256, in scripts/peers.lock.json, for a Python and a CUDA; pip checks it while downloading, and it is checked again
here before anything is unpacked. `--update-lock` asks the index anew for the versions that the lock names.

peer             from                                                        size packed (xz)
flash_mla_vllm   vllm wheel (250 MB, downloaded once): one shared object     0.9 MB
fa3_qv           the same wheel: one shared object of 150 MB                 11 MB
fa4              flash-attn-4, quack-kernels, einops; CuTe DSL is not        1 MB
                 included (the cute-dsl language needs it as well)
flashinfer_fa3   sources in FlashInfer's wheel (65 MB), built here with      0.3 MB
flashinfer_fa2   nvcc for sm_90a; and TVM-FFI to load them, which is         0.4 MB
                 used where none is installed                                1 MB
flash_mla_lib    nothing: the index has no wheel of it; install flash_mla     -
                 from its repository on the machine with the GPU
tilelang_mla     the example file (--tilelang-example); tilelang itself      0
                 (50 MB) is to be installed on the machine
cudnn_sdpa       nothing: it is in torch

Those that need nvcc or a file are left out, with the reason, when it is not there and nobody named them.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "src"))

from mla_var3.errors import EXIT_USER_ERROR, UserError, nearest  # noqa: E402
from mla_var3.kernel.peer.lib.find import FETCHED  # noqa: E402

LOCK = Path(__file__).with_name("peers.lock.json")
#: What the GPU machine's system may be: tags of wheels that pip is to take.
GLIBC = (35, 34, 31, 28, 27, 24, 17)
#: What a fetched folder holds.
FOLDER = ("activate", "site", "fallback")
ACTIVATE = """\
# source this file: the fetched peers are then found
_peers=$(dirname "$(realpath "${BASH_SOURCE[0]}")")
export PYTHONPATH="$_peers/site${PYTHONPATH:+:$PYTHONPATH}"
"""


@dataclass(frozen=True)
class Source:
    """What a peer takes. wheels: distributions of the lock. members: files out of the first wheel, and where they go in
    the fetched package; without any, the wheels are unpacked whole. builder: the method that builds it from sources."""

    wheels: tuple[str, ...] = ()
    members: tuple[tuple[str, str], ...] = ()
    builder: str = ""


SOURCES: dict[str, Source] = {
    "flash_mla_vllm": Source(("vllm",), (("vllm/_flashmla_C.abi3.so", "vllm/_flashmla_C.abi3.so"),)),
    "fa3_qv": Source(
        ("vllm",),
        (("vllm/vllm_flash_attn/_vllm_fa3_C.abi3.so", "vllm/vllm_flash_attn/_vllm_fa3_C.abi3.so"),),
    ),
    "fa4": Source(("flash-attn-4", "quack-kernels", "einops")),
    "flashinfer_fa3": Source(("flashinfer-python", "apache-tvm-ffi"), builder="flashinfer"),
    "flashinfer_fa2": Source(("flashinfer-python", "apache-tvm-ffi"), builder="flashinfer"),
    "flash_mla_lib": Source(),
    "tilelang_mla": Source(builder="tilelang"),
    "cudnn_sdpa": Source(),
}


# ---------------------------------------------------------------- the lock
def read_lock(path: Path, python: str, cuda: str) -> dict[str, dict[str, Any]]:
    """Distribution -> {version, filename, sha256} for a Python and a CUDA. Raises `UserError` for others."""
    data = json.loads(path.read_text(encoding="utf-8"))
    key = f"py{python}-{cuda}"
    if key not in data["targets"]:
        raise UserError(f"{path.name} has no files for {key}: {nearest(key, data['targets'])}; --update-lock adds one.")
    wheels: dict[str, dict[str, Any]] = data["targets"][key]
    return wheels


def update_lock(path: Path, python: str, cuda: str) -> None:
    """Asks the index for the lock's versions and writes file names and hashes for a Python and a CUDA."""
    data = json.loads(path.read_text(encoding="utf-8"))
    if cuda != data["cuda"]:
        raise UserError(f"the index has these wheels for {data['cuda']} only: leave --cuda out.")
    found: dict[str, Any] = {}
    for name, version in data["versions"].items():
        report = _pip(
            "install", "--dry-run", "--ignore-installed", "--no-deps", "--quiet", "--report", "-",
            "--target", "unused", *_platform(python), f"{name}=={version}",
        )  # fmt: skip
        info = json.loads(report)["install"][0]["download_info"]
        sha256 = info["archive_info"]["hashes"]["sha256"]
        found[name] = {"version": version, "filename": info["url"].rsplit("/", 1)[-1], "sha256": sha256}
        print(f"{name} {version}: {sha256}")
    data["targets"][f"py{python}-{cuda}"] = found
    path.write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")


def _platform(python: str) -> list[str]:
    tags = [f"manylinux_2_{n}_x86_64" for n in GLIBC] + ["manylinux2014_x86_64", "manylinux2010_x86_64"]
    flags = ["--only-binary=:all:", "--python-version", python, "--implementation", "cp"]
    return flags + [word for tag in tags for word in ("--platform", tag)]


def _pip(*arguments: str) -> str:
    done = subprocess.run([sys.executable, "-m", "pip", *arguments], text=True, capture_output=True, check=False)
    if done.returncode:
        lines = [x for x in done.stderr.splitlines() if x.startswith("ERROR")] or done.stderr.splitlines()[-1:]
        raise UserError(f"pip could not get it: {' '.join(lines)[:400]}")
    return done.stdout


def sha256_of(path: Path) -> str:
    """Hex digest of a file."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


# ---------------------------------------------------------------- fetching
class Fetcher:
    """Fetches peers into `folder`; wheels stay in `cache` for the next time."""

    def __init__(self, folder: Path, cache: Path, python: str, cuda: str, lock: Path, options: Any) -> None:
        self.site = folder / "site"
        self.package = self.site / FETCHED
        self.folder, self.cache, self.python, self.cuda = folder, cache, python, cuda
        self.lock = read_lock(lock, python, cuda)
        self.options = options
        self.files: dict[str, dict[str, str]] = {}

    def fetch(self, peers: Sequence[str], *, strict: bool) -> dict[str, str]:
        """Peer -> "" when it was fetched, else why it was left out. strict: raise instead of leaving out."""
        self.package.mkdir(parents=True, exist_ok=True)
        manifest = self.package / "manifest.json"
        if manifest.is_file():
            self.files = json.loads(manifest.read_text(encoding="utf-8")).get("files", {})
        result = {}
        for peer in peers:
            try:
                self._fetch(peer)
                result[peer] = ""
            except UserError as error:
                if strict:
                    raise
                result[peer] = str(error)
        about = {"python": self.python, "cuda": self.cuda, "files": dict(sorted(self.files.items()))}
        manifest.write_text(json.dumps(about, indent=2) + "\n", encoding="utf-8")
        (self.folder / "activate").write_text(ACTIVATE, encoding="utf-8")
        return result

    def _fetch(self, peer: str) -> None:
        source = SOURCES[peer]
        if source.builder:
            getattr(self, f"_build_{source.builder}")(peer)
        elif source.members:
            wheel = self.wheel(source.wheels[0])
            with zipfile.ZipFile(wheel) as archive:
                for member, relative in source.members:
                    if member not in archive.namelist():
                        raise UserError(f"{wheel.name} has no {member}: the lock names another release.")
                    with archive.open(member) as content:
                        self._keep(relative, content, self.lock[source.wheels[0]]["version"], wheel.name)
        else:
            for name in source.wheels:
                with zipfile.ZipFile(self.wheel(name)) as archive:
                    archive.extractall(self.site)

    def wheel(self, name: str) -> Path:
        """The pinned wheel of a distribution, downloaded unless it is in the cache, its hash checked either way."""
        entry = self.lock[name]
        path = self.cache / entry["filename"]
        if not path.is_file():
            self.cache.mkdir(parents=True, exist_ok=True)
            print(f"downloading {entry['filename']} ...", flush=True)
            with tempfile.NamedTemporaryFile("w", suffix=".txt") as pinned:
                pinned.write(f"{name}=={entry['version']} --hash=sha256:{entry['sha256']}\n")
                pinned.flush()
                flags = ["--quiet", "--no-deps", "--no-cache-dir", "--require-hashes", "--dest", str(self.cache)]
                _pip("download", *flags, *_platform(self.python), "-r", pinned.name)
        found = sha256_of(path)
        if found != entry["sha256"]:
            raise UserError(f"{path} has SHA-256 {found}, the lock says {entry['sha256']}: delete it and fetch again.")
        return path

    def _keep(self, relative: str, content: Any, version: str, origin: str) -> None:
        target = self.package / relative
        target.parent.mkdir(parents=True, exist_ok=True)
        with target.open("wb") as file:
            shutil.copyfileobj(content, file)
        self.files[relative] = {"version": version, "origin": origin, "sha256": sha256_of(target)}

    # ------------------------------------------------------------ building
    def _nvcc(self) -> str:
        nvcc = shutil.which(self.options.nvcc)
        if nvcc is None:
            raise UserError(f"there is no {self.options.nvcc} here: it is built with CUDA's compiler, see --nvcc.")
        return nvcc

    def _build(self, relative: str, sources: Sequence[Path], flags: Sequence[str], version: str, origin: str) -> None:
        """One shared object for sm_90a, with the CUDA runtime inside, so that it needs the driver only."""
        nvcc = self._nvcc()
        release = subprocess.run([nvcc, "--version"], text=True, capture_output=True, check=False).stdout
        common = ["-O3", "-DNDEBUG", "-Xcompiler", "-fPIC", "-gencode", "arch=compute_90a,code=sm_90a"]
        with tempfile.TemporaryDirectory() as work:
            objects = []
            for index, source in enumerate(sources):
                print(f"compiling {source.name} ...", flush=True)
                objects.append(f"{work}/{index}.o")
                _run([nvcc, *common, *flags, "-c", str(source), "-o", objects[-1]])
            _run([nvcc, "-shared", "-cudart", "static", "-o", f"{work}/lib.so", *objects])
            text = release.strip().splitlines()[-1] if release.strip() else nvcc
            with open(f"{work}/lib.so", "rb") as content:
                self._keep(relative, content, version, f"{origin}, built for sm_90a with {text}")

    def _unpacked(self, wheel: Path, prefixes: Sequence[str]) -> Path:
        target = self.cache / f"{wheel.stem}-sources"
        mark = target / ".complete"
        if not mark.is_file():
            with zipfile.ZipFile(wheel) as archive:
                archive.extractall(target, [x for x in archive.namelist() if x.startswith(tuple(prefixes))])
            mark.touch()
        return target

    def _flashinfer_data(self) -> Path:
        data = "flashinfer/data/"
        parts = ("csrc/batch_mla", "csrc/tvm_ffi_utils.h", "include/", "cutlass/include/", "cccl/", "spdlog/include/")
        return self._unpacked(self.wheel("flashinfer-python"), [data + x for x in parts]) / data

    def _build_flashinfer(self, peer: str) -> None:
        self._nvcc()
        backend = peer.rsplit("_", 1)[1]
        data = self._flashinfer_data()
        loader = self._unpacked(self.wheel("apache-tvm-ffi"), ["tvm_ffi/"])
        # What is only needed for building stays here.
        skip = shutil.ignore_patterns("include", "3rdparty", "src", "share", "cpp", "cython")
        shutil.copytree(loader / "tvm_ffi", self.folder / "fallback/tvm_ffi", ignore=skip, dirs_exist_ok=True)
        ffi = loader / "tvm_ffi/include"
        kind = "_sm90" if backend == "fa3" else ""
        config = (data / "csrc/batch_mla_config.jinja").read_text(encoding="utf-8")
        bf16 = "__nv_bfloat16"
        for key, value in {
            "dtype_q": bf16, "dtype_kv": bf16, "dtype_o": bf16, "dtype_idx": "int32_t",
            "head_dim_ckv": "512", "head_dim_kpe": "64",
        }.items():  # fmt: skip
            config = config.replace("{{ " + key + " }}", value)
        if "{{" in config:
            raise UserError("FlashInfer's batch_mla_config.jinja has fields that this script does not know.")
        # First the vendored CCCL: the toolkit's own may be too old.
        cccl = ("cccl/cub", "cccl/libcudacxx/include", "cccl/thrust")
        folders = [*(data / x for x in cccl), ffi, data / "include", data / "csrc", data / "cutlass/include"]
        with tempfile.TemporaryDirectory() as work:
            (Path(work) / f"batch_mla{kind}_config.inc").write_text(config, encoding="utf-8")
            sources = [data / f"csrc/batch_mla{kind}_{part}.cu" for part in ("plan", "run", "binding")]
            flags = ["-std=c++17", "--expt-relaxed-constexpr", "-static-global-template-stub=false"]
            flags += ["-DFLASHINFER_ENABLE_BF16", "-DFLASHINFER_ENABLE_F16", "-DCUTE_SM90_EXTENDED_MMA_SHAPES_ENABLED"]
            flags += ["-DFLASHINFER_ENABLE_FP8_E4M3", "-DFLASHINFER_ENABLE_FP8_E5M2"]
            flags += ["-DFLASHINFER_ENABLE_FP8_E8M0", "-DFLASHINFER_ENABLE_FP4_E2M1"]
            flags += ["-I", work, *(word for x in (*folders, data / "spdlog/include") for word in ("-I", str(x)))]
            version = self.lock["flashinfer-python"]["version"]
            self._build(f"flashinfer/batch_mla_{backend}.so", sources, flags, version, "flashinfer-python")

    def _build_tilelang(self, peer: str) -> None:
        if self.options.tilelang_example is None:
            raise UserError(f"{peer} is TileLang's example_mla_decode_paged.py: name the file with --tilelang-example.")
        path = Path(self.options.tilelang_example)
        if not path.is_file():
            raise UserError(f"there is no file {path}.")
        with path.open("rb") as content:
            self._keep("tilelang/example_mla_decode_paged.py", content, sha256_of(path)[:12], "tile-ai/tilelang")


def _run(command: Sequence[str]) -> None:
    done = subprocess.run(command, text=True, capture_output=True, check=False)
    if done.returncode:
        errors = [x for x in (done.stderr + done.stdout).splitlines() if "error" in x.lower()][:3]
        raise UserError(f"{Path(command[0]).name} failed: {' | '.join(errors) or done.stderr[-300:]}")


def pack(folder: Path, target: Path) -> int:
    """Writes what was fetched as one .tar.xz; returns its size in bytes."""

    def plain(info: tarfile.TarInfo) -> tarfile.TarInfo | None:
        if "__pycache__" in info.name:
            return None
        info.uid = info.gid = 0
        info.uname = info.gname = ""
        info.mtime = 0
        return info

    target.parent.mkdir(parents=True, exist_ok=True)
    # A large dictionary: the kernels of one library resemble each other.
    with tarfile.open(target, "w:xz", preset=9) as archive:
        for name in FOLDER:
            if (folder / name).exists():
                archive.add(folder / name, name, filter=plain)
    return target.stat().st_size


# ---------------------------------------------------------------- command line
def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("peers", nargs="*", metavar="PEER", help="which (default: all that can be had)")
    parser.add_argument("--python", default="3.12", help="of the GPU machine (default: %(default)s)")
    parser.add_argument("--cuda", default="cu13", help="of the GPU machine's torch (default: %(default)s)")
    parser.add_argument("--dir", type=Path, default=ROOT / "out/peers", help="where they go (default: out/peers)")
    parser.add_argument(
        "--cache", type=Path, default=Path.home() / ".cache/mla_var3/peers", help="where wheels are kept"
    )
    parser.add_argument("--pack", type=Path, metavar="FILE", help="write one archive (.tar.xz) to carry over")
    parser.add_argument("--fresh", action="store_true", help="empty the folder first, so that the pack holds no more")
    parser.add_argument("--nvcc", default="nvcc", help="CUDA's compiler, 12.9 or later (default: the one on PATH)")
    parser.add_argument("--tilelang-example", metavar="FILE", help="examples/deepseek_mla/example_mla_decode_paged.py")
    parser.add_argument("--lock", type=Path, default=LOCK, help=argparse.SUPPRESS)
    parser.add_argument("--update-lock", action="store_true", help="ask the index for the lock's versions, and stop")
    args = parser.parse_args(arguments)
    try:
        return _main(args)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_USER_ERROR


def _main(args: argparse.Namespace) -> int:
    for peer in args.peers:
        if peer not in SOURCES:
            raise UserError(f"there is no peer {peer!r}: {nearest(peer, SOURCES)}.")
    if args.update_lock:
        update_lock(args.lock, args.python, args.cuda)
        return 0
    if args.fresh and args.dir.exists():
        if any(x.name not in FOLDER for x in args.dir.iterdir()):
            raise UserError(f"{args.dir} holds more than peers: it is not emptied; choose another --dir.")
        shutil.rmtree(args.dir)
    fetcher = Fetcher(args.dir, args.cache, args.python, args.cuda, args.lock, args)
    result = fetcher.fetch(args.peers or list(SOURCES), strict=bool(args.peers))
    for peer, reason in result.items():
        print(f"{peer:16} {'here' if not reason else 'left out: ' + reason}")
    print(f"in {args.dir}: . {args.dir / 'activate'}")
    if args.pack is not None:
        print(f"packed: {args.pack}, {pack(args.dir, args.pack) / 1e6:.1f} MB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
