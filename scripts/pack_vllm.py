#!/usr/bin/env python3
"""Packs a wheel of vLLM, and what it imports, for a GPU machine that reaches no package index.

    pip download --no-deps --python-version 3.12 --only-binary=:all: vllm==0.25.1
    scripts/pack_vllm.py vllm-0.25.1-*.whl out/vllm.tar.xz

That machine has torch of the wheel's CUDA, triton, transformers and numpy. The folder into which the pack is unpacked
goes onto the path of modules, for `examples/serve_vllm.py`. Left out is what serving a model of text with MLA on one
architecture does not load: other libraries, machine code for other architectures, and FlashAttention-3 of other head
sizes. What was left out is printed.
"""

from __future__ import annotations

import argparse
import re
import shutil
import struct
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

#: Files of the wheel that are left out.
LEFT_OUT = (
    r"_vllm_fa2_C", r"_qutlass_C", r"vllm/vllm-rs", r"_rust_tool_parser", r"fs_io_C", r"third_party/deep_gemm",
    r"third_party/fmha_sm100", r"/static/", r"\.(h|hpp|cuh|cu)$", r"vllm/benchmarks/",
    r"(configs|helion)/.*\.json$",
)  # fmt: skip
#: Of FlashAttention-3, the sources whose kernels stay: prompts of MLA, decode of MLA, merging of splits.
FLASH_ATTENTION = r"flash_fwd_hdim(192_128|64_512)_bf16|flash_fwd_combine|flash_prepare"
#: What vLLM imports while it serves, and a machine with torch and transformers lacks.
NEEDED = (
    "annotated-types", "apache-tvm-ffi", "blake3", "cachetools", "cbor2", "compressed-tensors", "depyf", "astor",
    "dill", "diskcache", "fastapi", "ijson", "interegular", "jsonschema", "jsonschema-specifications", "jiter", "lark",
    "lm-format-enforcer", "msgspec", "openai", "openai-harmony", "partial-json-parser", "pybase64", "pydantic",
    "pydantic-core", "pydantic-extra-types", "python-json-logger", "python-multipart", "pyzmq", "referencing",
    "rpds-py", "setproctitle", "sniffio", "starlette", "typing-inspection", "httpx2", "httpcore2", "distro",
    "llguidance", "pyelftools", "torch-c-dlpack-ext", "model-hosting-container-standards",
    "prometheus-fastapi-instrumentator", "truststore", "tzdata",
    "xgrammar==0.2.1",  # later ones ask for another apache-tvm-ffi than the wheel pins
)  # fmt: skip
MAGIC = struct.pack("<I", 0xBA55ED50)
ELF = 2
#: An architecture that no GPU has whose machine code is kept.
NONE = 120


def machine_code(data: bytearray) -> Iterator[tuple[int, int, int, slice]]:
    """The entries of all fat binaries of a library: kind, architecture and its place, place of the code."""
    at = data.find(MAGIC)
    while at >= 0:
        header, size = struct.unpack_from("<HQ", data, at + 6)
        place, end = at + header, at + header + size
        while place < end:
            kind, _, before, length = struct.unpack_from("<HHIQ", data, place)
            (architecture,) = struct.unpack_from("<I", data, place + 28)
            yield kind, architecture, place + 28, slice(place + before, place + before + length)
            place += before + length
        at = data.find(MAGIC, end)


def prune(path: Path, architecture: int) -> int:
    """Overwrites with zeros the code that is not used, so that it takes no room in a pack; returns how many bytes. It
    is marked as another architecture's, so that nothing tries to load it."""
    data, gone = bytearray(path.read_bytes()), 0
    for kind, made_for, mark, place in machine_code(data):
        unused = kind != ELF or made_for != architecture
        if not unused and "_vllm_fa3_C" in path.name:
            source = re.search(rb"_(flash_\w+?_cu)_", data[place])
            unused = source is not None and not re.match(FLASH_ATTENTION, source[1].decode())
        if unused:
            gone += place.stop - place.start
            data[place] = bytes(place.stop - place.start)
            struct.pack_into("<I", data, mark, NONE)
    path.write_bytes(data)
    return gone


def requirements(folder: Path) -> dict[str, str]:
    """Package -> how the wheel asks for it."""
    (metadata,) = folder.glob("vllm-*.dist-info/METADATA")
    asked = {}
    for line in metadata.read_text(encoding="utf-8").splitlines():
        found = re.match(r"Requires-Dist: ([\w.-]+)(?:\[[\w,]+\])?([^;]*)(;.*)?$", line)
        if found and "extra ==" not in (found[3] or ""):
            asked[found[1].lower().replace("_", "-")] = found[2].strip()
    return asked


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])  # type: ignore[union-attr]
    parser.add_argument("wheel", type=Path)
    parser.add_argument("pack", type=Path, help="the file to write; a folder of the same name is made beside it")
    parser.add_argument("--arch", type=int, default=90, help="architecture whose machine code stays; 90 is Hopper")
    parser.add_argument("--python", default="3.12", help="Python there")
    given = parser.parse_args()
    folder = given.pack.with_name(given.pack.name.partition(".")[0])
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    with zipfile.ZipFile(given.wheel) as wheel:
        for item in wheel.infolist():
            if any(re.search(pattern, item.filename) for pattern in LEFT_OUT):
                if item.file_size > 1 << 20:
                    print(f"left out: {item.filename}, {item.file_size / 2**20:.1f} MiB")
            else:
                wheel.extract(item, folder)
    asked = requirements(folder)
    words = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--only-binary=:all:", "--no-compile"]
    words += ["--python-version", given.python, "--implementation", "cp", "--target", str(folder)]
    words += [f"--platform=manylinux_2_{n}_x86_64" for n in range(5, 40)]
    words += ["--platform=manylinux2014_x86_64", "--platform=manylinux1_x86_64"]
    subprocess.run([*words, *(name + asked.get(name, "") for name in NEEDED)], check=True)
    print("required by the wheel and not packed:", ", ".join(sorted(set(asked) - set(NEEDED))))
    shutil.rmtree(folder / "bin", ignore_errors=True)
    for archive in folder.rglob("*.a"):
        archive.unlink()
    for library in sorted(folder.rglob("*.so*")):
        subprocess.run(["strip", "-s", str(library)], check=False)
        gone = prune(library, given.arch)
        if gone:
            print(f"{library.relative_to(folder)}: {gone / 2**20:.1f} MiB of other machine code zeroed")
    subprocess.run(["tar", "-I", "xz -T2 -6", "-cf", str(given.pack), "-C", str(folder), "."], check=True)
    print(f"{given.pack}: {given.pack.stat().st_size / 2**20:.1f} MiB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
