"""Finds other people's libraries without importing them, and says how to get the one that is missing.

Each peer has a function below, which looks in one or several of these places, in this order:

1. the package `mla_var3_peers` on Python's path, in the folder that `scripts/fetch_peers.py` makes (its `activate` file
   puts the folder there). It holds shared objects out of wheels, objects built from sources, and `manifest.json`, which
   says what each file is and where it came from. Fetching is deliberate, so it wins over what happens to be installed;
2. the packages on Python's path. Packages that were fetched whole lie there too, before the installed ones;
3. of TileLang's example, where none was fetched but tilelang is installed: the file that `MLA_VAR3_TILELANG_EXAMPLE`
   names, and only without that variable the example beside the package.

A library that comes with torch, and what torch.compile makes, are looked for in torch's own folder only.

`find_spec` of a top-level name does not import it, so looking costs a few file system calls.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from importlib import metadata, util
from pathlib import Path
from typing import Any

from mla_var3.errors import Unsupported

FETCHED = "mla_var3_peers"
FETCH = "scripts/fetch_peers.py"
#: Environment variable: TileLang's example, for a tilelang that is installed without it.
TILELANG_EXAMPLE = "MLA_VAR3_TILELANG_EXAMPLE"


@dataclass(frozen=True)
class Library:
    """One library that is here.

    kind: which way of calling it applies (each wrapper documents its own). path: the shared object, or the package's
    folder. version and origin: for records ("0.25.1", "vllm wheel, fetched").
    """

    peer: str
    kind: str
    path: Path
    version: str
    origin: str

    def to_record(self) -> dict[str, str]:
        return {"peer": self.peer, "kind": self.kind, "version": self.version, "origin": self.origin}

    def files(self) -> list[Path]:
        """What runs: the shared object, else those of the package, else its Python files, which compile when called."""
        if self.path.suffix == ".so":
            return [self.path]
        folder = self.path if self.path.is_dir() else self.path.parent
        return sorted(folder.rglob("*.so")) or sorted(folder.rglob("*.py"))

    def fingerprint(self) -> str:
        """Hash of the names and contents of `files`, 16 hex digits."""
        digest = hashlib.sha256()
        for path in self.files():
            digest.update(f"{path.name} {_file_hash(path, path.stat().st_mtime_ns)}\n".encode())
        return digest.hexdigest()[:16]


@functools.cache
def _file_hash(path: Path, mtime_ns: int) -> str:
    """SHA-256 of a file; mtime_ns makes a changed file another one."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def fetched_dirs() -> list[Path]:
    """The fetched folders on Python's path, nearest first."""
    spec = util.find_spec(FETCHED)
    return [] if spec is None else [Path(p) for p in spec.submodule_search_locations or ()]


def package_dirs(name: str) -> list[Path]:
    """Folders of an installed top-level package (or namespace package), which is not imported."""
    try:
        spec = util.find_spec(name)
    except (ImportError, ValueError):
        return []
    return [] if spec is None else [Path(p) for p in spec.submodule_search_locations or ()]


def version_of(distribution: str) -> str:
    """Version of an installed distribution; "unknown" when it has no metadata."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return "unknown"


def _manifest(folder: Path) -> Mapping[str, Any]:
    path = folder / "manifest.json"
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return data.get("files", {}) if isinstance(data, dict) else {}


def _fetched(peer: str, kind: str, relative: str) -> Library | None:
    for folder in fetched_dirs():
        path = folder / relative
        if path.is_file():
            entry = _manifest(folder).get(relative, {})
            return Library(peer, kind, path, str(entry.get("version", "unknown")), str(entry.get("origin", "fetched")))
    return None


def _installed(peer: str, kind: str, package: str, relative: str, distribution: str) -> Library | None:
    for folder in package_dirs(package):
        path = folder / relative
        if path.exists():
            version = version_of(distribution)
            return Library(peer, kind, path, version, f"{distribution} {version}, installed")
    return None


# ---------------------------------------------------------------- the peers
def _flash_mla_lib() -> Library | None:
    return _installed("flash_mla_lib", "package", "flash_mla", "flash_mla_interface.py", "flash_mla")


def _flash_mla_vllm() -> Library | None:
    name = "_flashmla_C.abi3.so"
    return _fetched("flash_mla_vllm", "extension", f"vllm/{name}") or _installed(
        "flash_mla_vllm", "extension", "vllm", name, "vllm"
    )


def _fa3_qv() -> Library | None:
    name = "vllm_flash_attn/_vllm_fa3_C.abi3.so"
    return _fetched("fa3_qv", "extension", f"vllm/{name}") or _installed("fa3_qv", "extension", "vllm", name, "vllm")


def _also(peer: str, look: Callable[[], Library | None]) -> Callable[[], Library | None]:
    """Another peer that calls the library which `look` finds."""

    def found() -> Library | None:
        library = look()
        return None if library is None else replace(library, peer=peer)

    return found


def _flashinfer(backend: str) -> Callable[[], Library | None]:
    peer = f"flashinfer_{backend}"

    def look() -> Library | None:
        return _fetched(peer, "module", f"flashinfer/batch_mla_{backend}.so") or _installed(
            peer, "package", "flashinfer", "mla", "flashinfer-python"
        ) or _installed(peer, "package", "flashinfer", "mla.py", "flashinfer-python")  # fmt: skip

    return look


def _flashinfer_topk() -> Library | None:
    return _fetched("flashinfer_topk", "object", "flashinfer/topk.so")


def _sglang_topk() -> Library | None:
    return _fetched("sglang_topk", "module", "sglang/topk.so")


def _fa4() -> Library | None:
    if not package_dirs("quack"):
        return None
    return _installed("fa4", "package", "flash_attn", "cute/interface.py", "flash-attn-4")


def _in_torch(peer: str, what: str) -> Callable[[], Library | None]:
    """A library that torch's CUDA builds depend on; a CPU build has no folder of CUDA libraries beside it."""

    def look() -> Library | None:
        for folder in package_dirs("torch"):
            if (folder / "lib" / "libtorch_cuda.so").is_file():
                version = version_of("torch")
                return Library(peer, "torch", folder, version, f"torch {version} and its {what}")
        return None

    return look


def _torch_compile(peer: str) -> Callable[[], Library | None]:
    def look() -> Library | None:
        # What it makes depends on its own Python and on Triton; torch's libraries are no part of it.
        for folder in package_dirs("torch"):
            if (folder / "_inductor").is_dir() and package_dirs("triton"):
                version = f"{version_of('torch')}, triton {version_of('triton')}"
                return Library(peer, "torch", folder / "_inductor", version, f"torch.compile of torch {version}")
        return None

    return look


def _quack_rmsnorm() -> Library | None:
    return _installed("quack_rmsnorm", "package", "quack", "rmsnorm.py", "quack-kernels")


def _flashinfer_rmsnorm() -> Library | None:
    return _installed(
        "flashinfer_rmsnorm", "package", "flashinfer", "norm", "flashinfer-python"
    ) or _installed("flashinfer_rmsnorm", "package", "flashinfer", "norm.py", "flashinfer-python")  # fmt: skip


def _flashinfer_ragged() -> Library | None:
    return _installed("flashinfer_ragged", "package", "flashinfer", "prefill.py", "flashinfer-python")


def _flashinfer_rope_append() -> Library | None:
    return _installed("flashinfer_rope_append", "package", "flashinfer", "rope.py", "flashinfer-python")


def _deep_gemm() -> Library | None:
    return _installed("deep_gemm", "package", "deep_gemm", "__init__.py", "deep_gemm")


def _tilelang_mla() -> Library | None:
    name = "example_mla_decode_paged.py"
    installed = package_dirs("tilelang")
    example = _fetched("tilelang_mla", "example", f"tilelang/{name}")
    if example is not None and tilelang_packages(example) is not None:
        return example
    if not installed:
        return None
    version = version_of("tilelang")
    if example is not None:
        return replace(example, version=version, origin=f"TileLang's example, {example.origin}")
    given = os.environ.get(TILELANG_EXAMPLE)
    places = [Path(given)] if given else [x.parent / "examples" / "deepseek_mla" / name for x in installed]
    for path in places:
        if path.is_file():
            return Library("tilelang_mla", "example", path, version, f"tilelang {version}, installed; {path}")
    return None


def tilelang_packages(library: Library) -> Path | None:
    """The folder of packages that was fetched beside TileLang's example; None where tilelang is an installed one."""
    folder = library.path.parent / "packages"
    return folder if (folder / "tilelang").is_dir() else None


_LOOK: dict[str, Callable[[], Library | None]] = {
    "flash_mla_lib": _flash_mla_lib,
    "flash_mla_vllm": _flash_mla_vllm,
    "fa3_qv": _fa3_qv,
    "flashinfer_fa3": _flashinfer("fa3"),
    "flashinfer_fa2": _flashinfer("fa2"),
    "fa3": _also("fa3", _fa3_qv),
    "fa3_chunked": _also("fa3_chunked", _fa3_qv),
    "fa4": _fa4,
    "cudnn_sdpa": _in_torch("cudnn_sdpa", "cuDNN"),
    "cublas_bmm": _in_torch("cublas_bmm", "cuBLAS"),
    "tilelang_mla": _tilelang_mla,
    "torch_compile_rmsnorm": _torch_compile("torch_compile_rmsnorm"),
    "torch_compile_rope_append": _torch_compile("torch_compile_rope_append"),
    "torch_compile_merge_partials": _torch_compile("torch_compile_merge_partials"),
    "torch_compile_mla_layer": _torch_compile("torch_compile_mla_layer"),
    "flash_mla_layer": lambda: _flash_mla_lib() or _flash_mla_vllm(),
    "flash_mla_sparse": _also("flash_mla_sparse", _flash_mla_lib),
    "fa3_sparse": _also("fa3_sparse", _fa3_qv),
    "flashinfer_sparse": _also("flashinfer_sparse", _flashinfer("fa3")),
    "quack_rmsnorm": _quack_rmsnorm,
    "flashinfer_rmsnorm": _flashinfer_rmsnorm,
    "flashinfer_rope_append": _flashinfer_rope_append,
    "flashinfer_ragged": _flashinfer_ragged,
    "deep_gemm": _deep_gemm,
    "torch_topk": _in_torch("torch_topk", "top-k"),
    "flashinfer_topk": _flashinfer_topk,
    "sglang_topk": _sglang_topk,
}

_FA3 = (
    "the FlashAttention-3 extension of a vllm wheel (vllm/vllm_flash_attn/_vllm_fa3_C.abi3.so)",
    f"run {FETCH} fa3_qv, or pip install vllm",
)
# What is missing, and how to get it: the two halves of the sentence.
_HOW: dict[str, tuple[str, str]] = {
    "flash_mla_lib": (
        "FlashMLA",
        f"run {FETCH} flash_mla_lib --flash-mla CHECKOUT, or pip install --no-build-isolation CHECKOUT",
    ),
    "flash_mla_vllm": (
        "the FlashMLA extension of a vllm wheel (vllm/_flashmla_C.abi3.so)",
        f"run {FETCH} flash_mla_vllm, or pip install vllm",
    ),
    "fa3_qv": _FA3,
    "flashinfer_fa3": ("FlashInfer", f"pip install flashinfer-python, or run {FETCH} flashinfer_fa3"),
    "flashinfer_fa2": ("FlashInfer", f"pip install flashinfer-python, or run {FETCH} flashinfer_fa2"),
    "fa4": (
        "FlashAttention-4 and quack",
        f"pip install --pre 'flash-attn-4[cu13]', or run {FETCH} fa4",
    ),
    "cudnn_sdpa": ("a torch with CUDA and cuDNN", "install torch's CUDA build"),
    "cublas_bmm": ("a torch with CUDA and cuBLAS", "install torch's CUDA build"),
    "tilelang_mla": (
        "tilelang and its example examples/deepseek_mla/example_mla_decode_paged.py",
        f"run {FETCH} tilelang_mla, or pip install tilelang and name the file in {TILELANG_EXAMPLE}",
    ),
    "torch_compile_rmsnorm": ("torch with Triton", "install torch's CUDA build"),
    "torch_compile_rope_append": ("torch with Triton", "install torch's CUDA build"),
    "torch_compile_merge_partials": ("torch with Triton", "install torch's CUDA build"),
    "torch_compile_mla_layer": ("torch with Triton", "install torch's CUDA build"),
    "flash_mla_layer": ("FlashMLA", f"run {FETCH} flash_mla_vllm or flash_mla_lib, or pip install vllm"),
    "flash_mla_sparse": (
        "FlashMLA",
        f"run {FETCH} flash_mla_lib --flash-mla CHECKOUT, or pip install --no-build-isolation CHECKOUT",
    ),
    "fa3_sparse": _FA3,
    "fa3": _FA3,
    "fa3_chunked": _FA3,
    "flashinfer_sparse": ("FlashInfer", f"pip install flashinfer-python, or run {FETCH} flashinfer_fa3"),
    "quack_rmsnorm": ("quack", f"pip install quack-kernels, or run {FETCH} quack_rmsnorm"),
    "flashinfer_rmsnorm": ("FlashInfer's package", "pip install flashinfer-python"),
    "flashinfer_rope_append": ("FlashInfer's package", "pip install flashinfer-python"),
    "flashinfer_ragged": ("FlashInfer's package", "pip install flashinfer-python"),
    "deep_gemm": (
        "DeepGEMM",
        f"run {FETCH} deep_gemm --deep-gemm CHECKOUT, or pip install --no-build-isolation CHECKOUT",
    ),
    "torch_topk": ("a torch with CUDA", "install torch's CUDA build"),
    "flashinfer_topk": ("FlashInfer's top-k", f"run {FETCH} flashinfer_topk"),
    "sglang_topk": ("SGLang's top-k", f"run {FETCH} sglang_topk"),
}

PEERS: tuple[str, ...] = tuple(_LOOK)


def find(peer: str) -> Library | None:
    """The library behind a peer, or None where it is not here. Looks again at every call: nothing is cached."""
    return _LOOK[peer]()


def versions() -> dict[str, str]:
    """Version of the library behind each peer that is here, and where it came from, for records."""
    here = {peer: find(peer) for peer in PEERS}
    return {peer: f"{library.version}, {library.origin}" for peer, library in here.items() if library is not None}


def absent(peer: str) -> str | None:
    """Why a peer cannot be used here and how to get it, in one sentence; None when it is here."""
    if peer not in _LOOK or find(peer) is not None:
        return None
    what, how = _HOW[peer]
    return f"peer/{peer} needs {what}, which is not here: {how}."


def require(peer: str) -> Library:
    """The library behind a peer; raises `Unsupported` with the sentence of `absent`."""
    library = find(peer)
    if library is None:
        raise Unsupported(absent(peer) or f"peer/{peer} is not here.")
    return library
