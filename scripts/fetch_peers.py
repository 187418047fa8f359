#!/usr/bin/env python3
"""Gets other people's libraries from the package index, for a GPU machine that reaches no index.

    scripts/fetch_peers.py                                     what the index alone can give, into out/peers
    scripts/fetch_peers.py fa3_qv fa4 --pack out/peers.tar.xz  two of them, and one archive to carry over

On the machine with the GPU:

    mkdir -p /tmp/peers && tar xJf peers.tar.xz -C /tmp/peers && . /tmp/peers/activate
    mla-var3 list          # the peers that are found have no remark beside them

Only what is used is kept: shared objects out of wheels, and packages without their sources. Every file of the index
is pinned, with its SHA-256, in scripts/peers.lock.json, for a Python and a CUDA; pip checks it while downloading, and
it is checked again here before anything is unpacked. `--update-lock` asks the index anew for the versions that the lock
names.

peer             from                                                        size packed (xz)
flash_mla_vllm   vllm wheel (250 MB, downloaded once): one shared object     0.9 MB
fa3_qv           the same wheel: one shared object of 150 MB                 11 MB
fa4              flash-attn-4, quack-kernels, einops; CuTe DSL is not        1 MB
                 included (the cute-dsl language needs it as well)
flashinfer_fa3   sources in FlashInfer's wheel (65 MB), built here with      0.3 MB
flashinfer_fa2   nvcc for sm_90a; and TVM-FFI to load them, which is         0.4 MB
                 used where none is installed                                1 MB
flash_mla_lib    built from a checkout (--flash-mla), for sm_90a, by its     3.5 MB
                 own setup.py: needs nvcc, the toolkit's headers and the
                 GPU machine's torch, so it is mostly run there
deep_gemm        built from a checkout (--deep-gemm) in the same way; it    2 MB
                 compiles its kernels with nvcc when they are first called
flashinfer_topk  sources in FlashInfer's wheel, built here as above          0.4 MB
sglang_topk      sources in SGLang's wheel (39 MB), built here with nvcc     0.2 MB
tilelang_mla     tilelang's wheel (45 MB), what it imports, and one file     32 MB
                 out of its source archive (92 MB, downloaded once); it
                 compiles on the GPU machine, which needs nvcc
quack_rmsnorm    quack-kernels; CuTe DSL is not included                     0.5 MB
cudnn_sdpa, cublas_bmm, torch_topk, torch_compile_rmsnorm, torch_compile_rope_append,
torch_compile_merge_partials, torch_compile_mla_layer                      nothing: they are in torch
flash_mla_layer                                                            nothing: flash_mla_lib, or flash_mla_vllm
flash_mla_sparse, fa3_sparse, flashinfer_sparse            nothing: flash_mla_lib; fa3_qv; flashinfer_fa3
fa3, fa3_chunked                                           nothing: fa3_qv
flashinfer_rmsnorm, flashinfer_rope_append, flashinfer_ragged
                                             nothing: pip install flashinfer-python, which compiles on the GPU machine

Those that need nvcc or a checkout are left out, with the reason, when it is not there and nobody named them.

FlashMLA, where the GPU, its torch and nvcc are (90 s on 16 cores):

    git clone --recursive https://github.com/deepseek-ai/FlashMLA && git -C FlashMLA checkout 9241ae3
    scripts/fetch_peers.py flash_mla_lib --flash-mla FlashMLA && . out/peers/activate

DeepGEMM the same way, with its submodules (revision 54e2261). `activate` then preloads the system's libstdc++, without
which DeepGEMM's extension crashes beside a torch that brings another:

    git clone --recursive https://github.com/deepseek-ai/DeepGEMM && git -C DeepGEMM checkout 54e2261
    scripts/fetch_peers.py deep_gemm --deep-gemm DeepGEMM && . out/peers/activate
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "src"))

from mla_var3.catalogue.libraries import FETCHED  # noqa: E402
from mla_var3.errors import EXIT_USER_ERROR, UserError, nearest  # noqa: E402

LOCK = Path(__file__).with_name("peers.lock.json")
#: What the GPU machine's system may be: tags of wheels that pip is to take.
GLIBC = (35, 34, 31, 28, 27, 24, 17)
#: What a fetched folder holds.
FOLDER = ("activate", "site", "fallback")
ACTIVATE = """\
# source this file: the fetched peers are then found
_peers=$(dirname "$(realpath "${BASH_SOURCE[0]}")")
export PYTHONPATH="$_peers/site${PYTHONPATH:+:$PYTHONPATH}"
# DeepGEMM's extension is built for the system's libstdc++, and crashes where another was loaded first.
if [ -d "$_peers/site/deep_gemm" ] && command -v ldconfig > /dev/null; then
    _cxx=$(ldconfig -p | awk '$1 == "libstdc++.so.6" && /x86-64/ {print $NF; exit}')
    [ -z "$_cxx" ] || export LD_PRELOAD="$_cxx${LD_PRELOAD:+:$LD_PRELOAD}"
fi
"""


@dataclass(frozen=True)
class Source:
    """What a peer takes. wheels: entries of the lock. members: files out of the first wheel, and where they go in the
    fetched package; without any, the wheels are unpacked whole. builder: the method that builds or assembles it."""

    wheels: tuple[str, ...] = ()
    members: tuple[tuple[str, str], ...] = ()
    builder: str = ""


#: TileLang's example, in its source archive and beside the packages that were fetched for it.
EXAMPLE = "examples/deepseek_mla/example_mla_decode_paged.py"
#: Which entries go before what is installed, as TileLang loads with no other releases, and which only fill gaps.
TILELANG = {
    "packages": ("tilelang", "z3-solver", "apache-tvm-ffi (tilelang)"),
    "fallback": ("cloudpickle", "ml-dtypes", "psutil", "tqdm"),
}
#: What compiling with TileLang does not read.
TILELANG_SKIPS = ("tilelang/3rdparty/tvm/src/", "z3/include/")

#: A function in C around FlashInfer's top-k, whose own interface needs headers of random numbers.
FLASHINFER_TOPK = """
#include <flashinfer/math.cuh>
#include <flashinfer/topk.cuh>
using namespace flashinfer::sampling;
extern "C" int flashinfer_topk(float* rows, int32_t* lengths, const int32_t* offsets, int32_t* indices, void* states,
                               int32_t n, int32_t columns, int32_t k, void* stream) {
  return TopKRaggedTransformDispatch<float, int32_t>(rows, indices, offsets, lengths, nullptr, n, k, columns,
      static_cast<RadixRowState*>(states), false, TopKTieBreak::None, static_cast<cudaStream_t>(stream));
}
"""
#: SGLang's top-k as a module for TVM-FFI, as its own loader makes one. That asks the GPU how many clusters of 16 CTAs
#: it runs at once; it is 8 here (an H200 has 8 GPCs of at least 16 SMs), and launches of more wait for each other.
SGLANG_TOPK = """
#include <tvm/ffi/function.h>
#include "deepseek_v4/topk_v2.cuh"
TVM_FFI_DLL_EXPORT_TYPED_FUNC(topk_transform_paged, sglang::TopKKernel<true>::transform_paged);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(topk_transform_ragged, sglang::TopKKernel<true>::transform_ragged);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(topk_plan, sglang::TopKKernel<true>::plan);
"""

SOURCES: dict[str, Source] = {
    "flash_mla_vllm": Source(("vllm",), (("vllm/_flashmla_C.abi3.so", "vllm/_flashmla_C.abi3.so"),)),
    "fa3_qv": Source(
        ("vllm",),
        (("vllm/vllm_flash_attn/_vllm_fa3_C.abi3.so", "vllm/vllm_flash_attn/_vllm_fa3_C.abi3.so"),),
    ),
    "fa4": Source(("flash-attn-4", "quack-kernels", "einops")),
    "flashinfer_fa3": Source(("flashinfer-python", "apache-tvm-ffi"), builder="flashinfer"),
    "flashinfer_fa2": Source(("flashinfer-python", "apache-tvm-ffi"), builder="flashinfer"),
    "flashinfer_topk": Source(("flashinfer-python", "apache-tvm-ffi"), builder="flashinfer_topk"),
    "sglang_topk": Source(("sglang", "apache-tvm-ffi"), builder="sglang_topk"),
    "flash_mla_lib": Source(builder="flash_mla"),
    "deep_gemm": Source(builder="deep_gemm"),
    "tilelang_mla": Source(
        ("tilelang (sources)", *TILELANG["packages"], *TILELANG["fallback"]),
        builder="tilelang",
    ),
    "quack_rmsnorm": Source(("quack-kernels",)),
    "cudnn_sdpa": Source(),
    "cublas_bmm": Source(),
    "torch_compile_rmsnorm": Source(),
    "torch_compile_rope_append": Source(),
    "torch_compile_merge_partials": Source(),
    "torch_compile_mla_layer": Source(),
    "flash_mla_layer": Source(),
    "flash_mla_sparse": Source(),
    "fa3_sparse": Source(),
    "fa3": Source(),
    "fa3_chunked": Source(),
    "flashinfer_sparse": Source(),
    "flashinfer_rmsnorm": Source(),
    "flashinfer_rope_append": Source(),
    "flashinfer_ragged": Source(),
    "torch_topk": Source(),
}


# ---------------------------------------------------------------- the lock
# A key is a distribution, or one with a remark: "tilelang (sources)" is its source archive, "apache-tvm-ffi (tilelang)"
# the release that another distribution needs.
SOURCES_MARK = " (sources)"


def distribution(entry: str) -> str:
    """The distribution that an entry of the lock is of."""
    return entry.split(" ", 1)[0]


def _flags(entry: str, python: str) -> list[str]:
    """What pip is told about an entry: a wheel for the other machine, or the source archive."""
    return ["--no-binary", distribution(entry)] if entry.endswith(SOURCES_MARK) else _platform(python)


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
            "--target", "unused", *_flags(name, python), f"{distribution(name)}=={version}",
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
        """The pinned file of an entry, downloaded unless it is in the cache, its hash checked either way."""
        entry = self.lock[name]
        path = self.cache / entry["filename"]
        if not path.is_file():
            self.cache.mkdir(parents=True, exist_ok=True)
            print(f"downloading {entry['filename']} ...", flush=True)
            with tempfile.NamedTemporaryFile("w", suffix=".txt") as pinned:
                pinned.write(f"{distribution(name)}=={entry['version']} --hash=sha256:{entry['sha256']}\n")
                pinned.flush()
                flags = ["--quiet", "--no-deps", "--no-cache-dir", "--require-hashes", "--dest", str(self.cache)]
                _pip("download", *flags, *_flags(name, self.python), "-r", pinned.name)
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

    def _flashinfer_sources(self) -> tuple[Path, list[str]]:
        """FlashInfer's sources, and the flags that find its headers. What loads the results is put into the folder."""
        names = ("csrc/batch_mla", "csrc/tvm_ffi_utils.h", "include/", "cutlass/include/", "cccl/", "spdlog/include/")
        root = self._unpacked(self.wheel("flashinfer-python"), [f"flashinfer/data/{x}" for x in names])
        data = root / "flashinfer/data"
        loader = self._unpacked(self.wheel("apache-tvm-ffi"), ["tvm_ffi/"])
        # What is only needed for building stays here.
        skip = shutil.ignore_patterns("include", "3rdparty", "src", "share", "cython")
        shutil.copytree(loader / "tvm_ffi", self.folder / "fallback/tvm_ffi", ignore=skip, dirs_exist_ok=True)
        # First the vendored CCCL: the toolkit's own may be too old.
        cccl = ("cccl/cub", "cccl/libcudacxx/include", "cccl/thrust")
        folders = [*(data / x for x in cccl), loader / "tvm_ffi/include", data / "include", data / "csrc"]
        folders += [data / "cutlass/include", data / "spdlog/include"]
        flags = ["-std=c++17", "--expt-relaxed-constexpr", "-static-global-template-stub=false"]
        flags += ["-DFLASHINFER_ENABLE_BF16", "-DFLASHINFER_ENABLE_F16"]
        return data, [*flags, *(word for x in folders for word in ("-I", str(x)))]

    def _build_flashinfer(self, peer: str) -> None:
        self._nvcc()
        backend = peer.rsplit("_", 1)[1]
        data, flags = self._flashinfer_sources()
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
        with tempfile.TemporaryDirectory() as work:
            (Path(work) / f"batch_mla{kind}_config.inc").write_text(config, encoding="utf-8")
            sources = [data / f"csrc/batch_mla{kind}_{part}.cu" for part in ("plan", "run", "binding")]
            flags += ["-DCUTE_SM90_EXTENDED_MMA_SHAPES_ENABLED"]
            flags += ["-DFLASHINFER_ENABLE_FP8_E4M3", "-DFLASHINFER_ENABLE_FP8_E5M2"]
            flags += ["-DFLASHINFER_ENABLE_FP8_E8M0", "-DFLASHINFER_ENABLE_FP4_E2M1", "-I", work]
            version = self.lock["flashinfer-python"]["version"]
            self._build(f"flashinfer/batch_mla_{backend}.so", sources, flags, version, "flashinfer-python")

    def _build_flashinfer_topk(self, peer: str) -> None:
        self._nvcc()
        _, flags = self._flashinfer_sources()
        self._build_text("flashinfer/topk.so", FLASHINFER_TOPK, flags, "flashinfer-python")

    def _build_sglang_topk(self, peer: str) -> None:
        self._nvcc()
        jit = "sglang/kernels/jit/"
        sources = self._unpacked(self.wheel("sglang"), [f"{jit}include/", f"{jit}csrc/deepseek_v4/"]) / jit
        loader = self._unpacked(self.wheel("apache-tvm-ffi"), ["tvm_ffi/"])
        folders = (loader / "tvm_ffi/include", sources / "include", sources / "csrc")
        flags = ["-std=c++20", "--expt-relaxed-constexpr", "-DSGL_CUDA_ARCH=900", "-DSGL_TOPK_V2_MAX_C16_OCC1=8"]
        flags += [word for x in folders for word in ("-I", str(x))]
        self._build_text("sglang/topk.so", SGLANG_TOPK, flags, "sglang")

    def _build_text(self, relative: str, text: str, flags: Sequence[str], wheel: str) -> None:
        """One shared object from a source of ours that includes those of a wheel."""
        with tempfile.TemporaryDirectory() as work:
            source = Path(work) / "topk.cu"
            source.write_text(text, encoding="utf-8")
            self._build(relative, [source], flags, self.lock[wheel]["version"], wheel)

    def _build_tilelang(self, peer: str) -> None:
        given = self.options.tilelang_example
        version = self.lock["tilelang"]["version"]
        if given is None:
            archive = self.wheel("tilelang (sources)")
            with tarfile.open(archive) as sources:
                name = f"tilelang-{version}/{EXAMPLE}"
                try:
                    content = sources.extractfile(name)
                except KeyError:
                    content = None
                if content is None:
                    raise UserError(f"{archive.name} has no {name}: the lock names another release.")
                self._keep(f"tilelang/{Path(EXAMPLE).name}", content, version, f"{EXAMPLE} of {archive.name}")
        else:
            path = Path(given)
            if not path.is_file():
                raise UserError(f"there is no file {path}.")
            with path.open("rb") as content:
                origin = f"{path.name}, SHA-256 {sha256_of(path)[:12]}"
                self._keep(f"tilelang/{Path(EXAMPLE).name}", content, version, origin)
        for folder, entries in TILELANG.items():
            for entry in entries:
                with zipfile.ZipFile(self.wheel(entry)) as wheel:
                    names = [x for x in wheel.namelist() if _compiles_tilelang(x)]
                    wheel.extractall(self.package / "tilelang" / folder, names)

    def _build_flash_mla(self, peer: str) -> None:
        settings = {"FLASH_MLA_DISABLE_SM100": "1", "NVCC_THREADS": "1"}
        self._build_checkout(peer, "FlashMLA", "flash_mla", ("csrc/cutlass/include",), settings)

    def _build_deep_gemm(self, peer: str) -> None:
        needed = ("third-party/cutlass/include", "third-party/fmt/include")
        self._build_checkout(peer, "DeepGEMM", "deep_gemm", needed, {"DG_FORCE_BUILD": "1"})

    def _build_checkout(
        self, peer: str, name: str, package: str, submodules: Sequence[str], settings: Mapping[str, str]
    ) -> None:
        """Builds a wheel of a checkout of deepseek-ai/`name` by its setup.py, and unpacks it where packages lie."""
        given, option = getattr(self.options, package), f"--{package.replace('_', '-')}"
        if given is None:
            raise UserError(f"{peer} is built from a checkout of deepseek-ai/{name}: name it with {option}.")
        checkout = Path(given)
        for needed, why in (("setup.py", "no checkout of it"), *((x, "without its submodule") for x in submodules)):
            if not (checkout / needed).exists():
                raise UserError(f"{checkout} has no {needed}, so it is {why}: git clone --recursive.")
        toolkit = self._toolkit()
        here = f"{sys.version_info.major}.{sys.version_info.minor}"
        if here != self.python:
            raise UserError(f"{peer} is built for Python {self.python} by that Python; this is {here}: see --python.")
        # CUDA 13 moved its C++ library; nvcc finds it, the host's compiler does not.
        headers = [str(x) for x in (toolkit / "include/cccl", toolkit / "include") if x.is_dir()]
        found = {
            "CUDA_HOME": str(toolkit),
            "CPATH": os.pathsep.join([*headers, *filter(None, [os.environ.get("CPATH")])]),
            **settings,
        }
        with tempfile.TemporaryDirectory() as work:
            shutil.copytree(checkout, f"{work}/{name}", symlinks=True, ignore=shutil.ignore_patterns("build", "*.so"))
            print(f"compiling {name} by its setup.py ...", flush=True)
            wheels = f"{work}/wheels"
            command = ["wheel", "--no-deps", "--no-build-isolation", "--no-index", "--wheel-dir", wheels]
            _run([sys.executable, "-m", "pip", *command, f"{work}/{name}"], {**os.environ, **found})
            with zipfile.ZipFile(next(Path(wheels).glob("*.whl"))) as wheel:
                for old in self.site.glob(f"{package}*"):
                    shutil.rmtree(old)
                wheel.extractall(self.site)

    def _toolkit(self) -> Path:
        """The folder of the CUDA toolkit: CUDA_HOME, or where nvcc lies."""
        home = os.environ.get("CUDA_HOME")
        found = Path(home) if home else Path(self._nvcc()).resolve().parents[1]
        if not (found / "include/cuda_runtime.h").is_file():
            raise UserError(f"{found} is not a CUDA toolkit with its headers: set CUDA_HOME.")
        return found


def _compiles_tilelang(name: str) -> bool:
    """Whether a file of TileLang's wheels is needed where it compiles."""
    if name.startswith("tilelang/src/"):
        return name.startswith("tilelang/src/tl_templates/")
    outside = ".data/" in name  # programs and other files beside the packages
    return not outside and not name.startswith(TILELANG_SKIPS)


def _run(command: Sequence[str], environment: Mapping[str, str] | None = None) -> None:
    done = subprocess.run(command, text=True, capture_output=True, check=False, env=environment)
    if done.returncode:
        errors = [x.strip()[:300] for x in (done.stderr + done.stdout).splitlines() if "error" in x.lower()][:3]
        what = "pip wheel" if "pip" in command else Path(command[0]).name
        raise UserError(f"{what} failed: {' | '.join(errors) or done.stderr[-300:]}")


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
    parser.add_argument("--flash-mla", metavar="CHECKOUT", help="of deepseek-ai/FlashMLA, with its submodule")
    parser.add_argument("--deep-gemm", metavar="CHECKOUT", help="of deepseek-ai/DeepGEMM, with its submodules")
    parser.add_argument("--tilelang-example", metavar="FILE", help=f"another {EXAMPLE} than the pinned release's")
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
