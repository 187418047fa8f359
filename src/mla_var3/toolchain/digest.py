"""What ran, as a digest: the machine code of a call's kernels, in order, and how the host launches them.

Two builds with the same digest are the same kernel, whatever their source looks like and whoever compiled them, so a
refactoring proves itself and records of the older source stay valid. A digest covers

    machine code    the bytes of each kernel's `.text` section: every instruction with its scheduling, branches relative
    constants       the kernel's own constant banks and initialised variables, and what is relocated into all of these
    resources       registers and the CTA's static shared memory
    launch          block, grid rule, cluster, dynamic shared memory and PDL attribute

and no address, symbol name or line information. Where a host function is compiled with its kernels (CuTe DSL), the
launch is that function's code, in which the rule for the grid stands. Elsewhere Python computes the grid from sizes,
which no digest covers, and the launch is the other values. Names of packages and their versions stand beside a digest,
not in it: another compiler that makes the same code changes nothing. cuTile's compiler makes other machine code of the
same Tile IR from run to run: there a digest covers the Tile IR, the compiler's options and its versions.
"""

from __future__ import annotations

import hashlib
import io
import json
import re
import struct
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

DIGITS = 16
_DATA = ("nv.constant", "nv.global.init", "rodata")
#: The launch parameters: zeros in a cubin, and their size follows from the code that reads them.
_PARAMETERS = "nv.constant0"
_SIZED, _REGISTER_COUNT = 0x04, 0x2F


@dataclass(frozen=True)
class KernelCode:
    """One kernel of a call. machine, constants: digests. registers: of a thread. smem_static: bytes of a CTA, with
    those that CUDA reserves."""

    name: str
    machine: str
    constants: str
    registers: int
    smem_static: int


@dataclass(frozen=True)
class Code:
    """The code of one call. launch: digests, one for each host function. toolchain: package -> version; not in
    `digest`.

    binary: hash of a library's files, of a call whose kernels come compiled; it has no `kernels`.
    """

    arch: str
    kernels: tuple[KernelCode, ...] = ()
    launch: tuple[str, ...] = ()
    binary: str = ""
    toolchain: Mapping[str, str] = field(default_factory=dict, compare=False, hash=False)

    @property
    def digest(self) -> str:
        """16 hex digits; equal exactly for the same code launched in the same way."""
        kernels = [[k.machine, k.constants, k.registers, k.smem_static] for k in self.kernels]
        return hash_of([self.arch, kernels, list(self.launch), self.binary])

    def differs_from(self, other: Code) -> list[str]:
        """What differs, in words; empty for the same code."""
        if self.digest == other.digest:
            return []
        found = []
        if self.arch != other.arch:
            found.append(f"architecture {self.arch} and {other.arch}")
        if self.binary != other.binary:
            found.append("the library's binary")
        if len(self.kernels) != len(other.kernels):
            found.append(f"{len(self.kernels)} and {len(other.kernels)} kernels")
        else:
            for mine, theirs in zip(self.kernels, other.kernels, strict=True):
                parts = [what for what in ("machine", "constants", "registers", "smem_static") if
                         getattr(mine, what) != getattr(theirs, what)]  # fmt: skip
                words = {"machine": "machine code", "smem_static": "static shared memory"}
                if parts:
                    found.append(f"{mine.name}: {', '.join(words.get(part, part) for part in parts)}")
        if self.launch != other.launch:
            found.append("launch (grid rule, block, cluster, shared memory or PDL)")
        return found

    def to_record(self) -> dict[str, Any]:
        """What a record holds as `code`."""
        data: dict[str, Any] = {"digest": self.digest, "arch": self.arch}
        if self.binary:
            data["binary"] = self.binary
        else:
            data |= {"kernels": [asdict(kernel) for kernel in self.kernels], "launch": list(self.launch)}
        if self.toolchain:
            data["toolchain"] = dict(self.toolchain)
        return data

    @classmethod
    def from_record(cls, data: Mapping[str, Any]) -> Code:
        """Inverse of `to_record`."""
        kernels = tuple(KernelCode(**kernel) for kernel in data.get("kernels", ()))
        return cls(
            data["arch"], kernels, tuple(data.get("launch", ())), data.get("binary", ""), data.get("toolchain", {})
        )

    @classmethod
    def of_stages(cls, codes: Sequence[Code | None]) -> Code | None:
        """The code of a call that launches several host functions one after the other; None where one is not known."""
        known = [code for code in codes if code is not None]
        if not known or len(known) != len(codes):
            return None
        kernels = tuple(kernel for code in known for kernel in code.kernels)
        launch = tuple(rule for code in known for rule in code.launch)
        toolchain = {name: version for code in known for name, version in code.toolchain.items()}
        return cls(known[0].arch, kernels, launch, toolchain=toolchain)


def hash_of(data: Any) -> str:
    """The digest of bytes, of text, or of plain data by its JSON."""
    if not isinstance(data, bytes):
        data = (data if isinstance(data, str) else json.dumps(data, sort_keys=True, default=str)).encode()
    return hashlib.sha256(data).hexdigest()[:DIGITS]


# ---------------------------------------------------------------- machine code
def of_cubin(
    cubin: bytes, arch: str, launch: str, order: Sequence[str] = (), toolchain: Mapping[str, str] | None = None
) -> Code:
    """The code of a cubin's kernels. launch: digest of the launch. order: mangled names in the order of their
    launch."""
    kernels = read(cubin)
    names = [name for name in order if name in kernels] or list(kernels)
    return Code(arch, tuple(kernels[name] for name in names), (launch,), toolchain=toolchain or {})


def read(cubin: bytes) -> dict[str, KernelCode]:
    """The kernels of a cubin by their mangled names, in the cubin's order."""
    from elftools.elf.elffile import ELFFile

    elf = ELFFile(io.BytesIO(cubin))
    sections = {section.name: section for section in elf.iter_sections()}
    names = [name.removeprefix(".text.") for name in sections if name.startswith(".text.")]
    registers = _registers(elf, sections)
    found = {}
    for name in names:
        text = sections[f".text.{name}"]
        constants: list[Any] = []
        for title, section in sections.items():
            kind = title.removeprefix(".").removesuffix(f".{name}")
            own = title.endswith(f".{name}") or not any(title.endswith(f".{other}") for other in names)
            if own and kind.startswith(_DATA) and kind != _PARAMETERS:
                constants.append([kind, section.data().hex(), _relocated(elf, sections, title, names, name)])
        shared = sections.get(f".nv.shared.{name}")
        found[name] = KernelCode(
            name=plain_name(name),
            machine=hash_of([text.data().hex(), _relocated(elf, sections, f".text.{name}", names, name)]),
            constants=hash_of(sorted(constants)) if constants else "",
            registers=registers.get(name, 0),
            smem_static=0 if shared is None else int(shared["sh_size"]),
        )
    return found


def _registers(elf: Any, sections: Mapping[str, Any]) -> dict[str, int]:
    """Registers of a thread, by kernel: the attributes of kind 0x2f of `.nv.info`, each a symbol and a count.

    An attribute is a byte that tells its form and one that tells its kind; form 4 is followed by a size and so many
    bytes, the others by two.
    """
    data, symbols = sections[".nv.info"].data(), elf.get_section_by_name(".symtab")
    found, at = {}, 0
    while at + 4 <= len(data):
        form, kind, size = struct.unpack_from("<BBH", data, at)
        at += 4
        if form != _SIZED:
            continue
        if kind == _REGISTER_COUNT:
            index, count = struct.unpack_from("<II", data, at)
            found[symbols.get_symbol(index).name] = count
        at += size
    return found


def _relocated(elf: Any, sections: Mapping[str, Any], title: str, names: Sequence[str], own: str) -> list[Any]:
    """Relocations into a section: place, kind, addend, and the symbol without the names of kernels."""
    found = []
    for kind in (".rela", ".rel"):
        table = sections.get(f"{kind}{title}")
        if table is None:
            continue
        symbols = elf.get_section(table["sh_link"])
        for entry in table.iter_relocations():
            symbol = symbols.get_symbol(entry["r_info_sym"]).name.replace(own, "self")
            for index, name in enumerate(names):
                symbol = symbol.replace(name, f"kernel{index}")
            addend = entry["r_addend"] if entry.is_RELA() else 0
            found.append([entry["r_offset"], entry["r_info_type"], addend, symbol])
    return found


def plain_name(symbol: str) -> str:
    """`flash_mla` of `flash_mla_0`, which CuTe DSL numbers, or of a mangled symbol."""
    plain = re.sub(r"^kernel_cutlass_", "", symbol)
    return re.split(r"_(?:[A-Z]\w*|tensor\w*|\d\w*)", plain)[0] or symbol


# ---------------------------------------------------------------- host functions of CuTe DSL
def host_function(ir: str) -> tuple[str, list[str]]:
    """(code of the host function without symbol names, kernels in the order in which it launches them) of an MLIR
    module.

    The grid rule, block, cluster, shared memory and attributes of each launch are in that code.
    """
    bodies = [body for body in ir.split("\n  llvm.func ") if "@_cudaLaunchKernelEx(" in body and "^bb" in body]
    launched: list[str] = []
    text = []
    for body in bodies:
        body = body.split("\n  }\n")[0]
        order = re.findall(r"addressof @kernels_([\w$.]+)", body)
        launched += [symbol for symbol in dict.fromkeys(order) if symbol not in launched]
        for index, symbol in enumerate(launched):
            body = body.replace(f"@kernels_{symbol} ", f"@kernel{index} ")
        signature, _, rest = body.partition("\n")
        arguments = re.sub(r"^[^(]*", "", signature)
        # What is left of names are runtime functions, and constants of messages that carry a kernel's name.
        text.append(arguments + "\n" + re.sub(r"array<\d+ x i8>", "text", rest))
    return "\n".join(text), launched
