"""Reading cubins: SASS text, resource usage, instruction counts. Needs `cuobjdump`, no GPU and no CUDA toolkit."""

from __future__ import annotations

import functools
import importlib.util
import io
import re
import shutil
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from mla_var3.errors import UserError
from mla_var3.files import no_space

# Always in a count, also when zero, so that records can be compared. Any other opcode group appears when it occurs.
HEADLINE = (
    "HGMMA",
    "QGMMA",
    "HMMA",
    "UTCMMA",
    "UTMALDG",
    "UTMASTG",
    "UBLKCP",
    "LDGSTS",
    "LDL",
    "STL",
    "BAR",
    "SYNCS",
    "WARPGROUP",
    "USETMAXREG",
    "MUFU.EX2",
)
_ALSO = re.compile(
    "IGMMA|IMMA|QMMA|OMMA|DMMA|UTMAREDG|UTMAPF|UTMACMDFLUSH|ACQBULK|LDG|STG|LDS|STS|LDSM|STSM|LDTM|STTM|ATOM[GS]?|RED|"
    "SHFL|FENCE|MEMBAR|ERRBAR|DEPBAR|WARPSYNC|FFMA2?|FMUL2?|FADD2?|HFMA2|F2FP|I2F|NANOSLEEP"
)
_LINE = re.compile(r"^\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_]*)((?:\.[A-Za-z0-9_]+)*)", re.MULTILINE)
_FUNCTION = re.compile(r"^\s*Function : (\S+)", re.MULTILINE)
#: What `nvdisasm -g` prints: the section of a kernel, where the next instructions are from, an instruction's address.
_SECTION = re.compile(r"\.text\.(\S+):$")
_MARK = re.compile(r'\s*//## File "([^"]+)", line (\d+)')
_AT = re.compile(r"\s+/\*([0-9a-f]{4,})\*/")
_WIDTHS = {"64": 8, "128": 16, "U8": 1, "S8": 1, "U16": 2, "S16": 2}
# From compute capability 9.0 on, the static size in a cubin includes the 1 KB that CUDA keeps for itself in a block.
_SYSTEM_SMEM = 1024


@dataclass(frozen=True)
class Usage:
    """What a cubin says of one of its kernels. Bytes; smem_static without what CUDA reserves; threads 0: unknown."""

    registers: int
    stack_bytes: int
    smem_static: int
    threads: int


@functools.cache
def tool(name: str) -> Path:
    """`cuobjdump`, `nvdisasm` or `ptxas`: from PATH, or from the triton wheel, which carries them."""
    spec = importlib.util.find_spec("triton")
    for root in spec.submodule_search_locations or () if spec else ():
        path = Path(root) / "backends" / "nvidia" / "bin" / name
        if path.is_file():
            return path
    found = shutil.which(name)
    if found:
        return Path(found)
    raise UserError(f"{name} is missing: pip install triton brings it, or put a CUDA toolkit's bin folder on PATH.")


def _with_file(cubin: bytes | Path, name: str, *options: str) -> str:
    """What a tool prints of a cubin."""
    if isinstance(cubin, bytes):
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            file.write(cubin)
            file.flush()
            return _with_file(Path(file.name), name, *options)
    if not cubin.is_file():
        raise UserError(f"there is no cubin at {cubin}.")
    done = subprocess.run([tool(name), *options, cubin], capture_output=True, text=True, check=False)
    if done.returncode:
        if (full := no_space()) is not None:  # the tool only says that it cannot read what it could not write
            raise UserError(full)
        said = (done.stderr or done.stdout).strip().splitlines()
        raise UserError(f"{name} cannot read the cubin: {said[-1] if said else f'exit status {done.returncode}'}.")
    return done.stdout


def disassemble(cubin: bytes | Path) -> str:
    """The SASS of every kernel in a cubin, as cuobjdump writes it."""
    return _with_file(cubin, "cuobjdump", "-sass")


def usage(cubin: bytes | Path) -> dict[str, Usage]:
    """Registers, stack, static shared memory and threads of every kernel in a cubin, by mangled name."""
    listing = _with_file(cubin, "cuobjdump", "-res-usage")
    elf = _with_file(cubin, "cuobjdump", "-elf")
    reserved = _SYSTEM_SMEM if ".nv.shared.reserved" in elf else 0
    found: dict[str, Usage] = {}
    for match in re.finditer(r"Function (\S+):\s+REG:(\d+) STACK:(\d+) SHARED:(\d+)", listing):
        name, registers, stack, shared = match[1], *map(int, match.groups()[1:])
        found[name] = Usage(registers, stack, max(0, shared - reserved), _threads(elf, name))
    return found


def _threads(elf: str, name: str) -> int:
    """Threads of a CTA as the kernel declares them (`.reqntid`, else `.maxntid`)."""
    start = elf.find(f"\n.nv.info.{name}\n")
    section = elf[start + 1 :] if start >= 0 else ""
    section = section.split("\n.nv.", 1)[0]
    for attribute in ("EIATTR_REQNTID", "EIATTR_MAX_THREADS"):
        match = re.search(attribute + r"\s+Format:\s*\S+\s+Value:\s*(0x\w+) (0x\w+) (0x\w+)", section)
        if match:
            x, y, z = (int(value, 16) for value in match.groups())
            return x * y * z
    return 0


def functions(sass: str) -> dict[str, str]:
    """Kernel name -> its part of the SASS text."""
    marks = list(_FUNCTION.finditer(sass))
    ends = [mark.start() for mark in marks[1:]] + [len(sass)]
    return {mark[1]: sass[mark.end() : end] for mark, end in zip(marks, ends, strict=True)}


def _opcodes(sass: str) -> Iterator[tuple[str, str]]:
    return ((match[1], match[2]) for match in _LINE.finditer(sass))


def is_counted(name: str) -> bool:
    """Whether `count_instructions` counts a group of this name where it occurs."""
    return name in HEADLINE or name == "UCGABAR" or _ALSO.fullmatch(name) is not None


def count_instructions(sass: str) -> dict[str, int]:
    """Instructions by group: `HEADLINE` (zeros included), others that matter where they occur, and `total`.

    UTCMMA is every tcgen05 product (UTCHMMA, UTCQMMA, ...). These are instructions in the code, not executions.
    """
    counts = Counter(dict.fromkeys(HEADLINE, 0))
    for opcode, modifiers in _opcodes(sass):
        counts["total"] += 1
        if opcode == "MUFU":
            if modifiers.startswith(".EX2"):
                counts["MUFU.EX2"] += 1
        elif opcode.startswith("UTC") and opcode.endswith("MMA"):
            counts["UTCMMA"] += 1
        elif opcode.startswith("UCGABAR"):
            counts["UCGABAR"] += 1
        elif opcode in counts or _ALSO.fullmatch(opcode):
            counts[opcode] += 1
    return dict(counts)


def width(modifiers: str) -> int:
    """Bytes that a load or store with these modifiers (".LU.64") moves for a thread."""
    return next((_WIDTHS[m] for m in modifiers.split(".") if m in _WIDTHS), 4)


def source_lines(cubin: bytes | Path) -> dict[str, dict[int, tuple[str, int]]]:
    """Kernel name -> address of each instruction -> (file, line) that the compiler ascribes it to; without entries for
    what has none, as all of a binary without line information."""
    found: dict[str, dict[int, tuple[str, int]]] = {}
    here: dict[int, tuple[str, int]] = {}
    place: tuple[str, int] | None = None
    for line in _with_file(cubin, "nvdisasm", "-g", "-c").splitlines():
        if (section := _SECTION.match(line)) is not None:
            here, place = found.setdefault(section[1], {}), None
        elif (mark := _MARK.match(line)) is not None:
            place = (mark[1], int(mark[2]))
        elif place is not None and (instruction := _AT.match(line)) is not None:
            here[int(instruction[1], 16)] = place
    return found


def code_sizes(cubin: bytes | Path) -> dict[str, int]:
    """Bytes of machine code of every kernel in a cubin, by mangled name."""
    from elftools.elf.elffile import ELFFile

    data = cubin if isinstance(cubin, bytes) else cubin.read_bytes()
    sections = ELFFile(io.BytesIO(data)).iter_sections()
    return {s.name.removeprefix(".text."): int(s["sh_size"]) for s in sections if s.name.startswith(".text.")}
