"""Code that a page shows. Every ```python block says how it is compiled, behind the word python:

    ```python sm_90a                                compiled for sm_90a
    ```python sm_90a expect=HGMMA,UTMALDG absent=STL    and its code must, and must not, hold these instructions
    ```python sm_90a raises="DSLRuntimeError: part of the message"    must fail in this way
    ```python host                                  runs on the host and compiles nothing

Blocks of a page run in order and share their names, as cells of a notebook do. A block that needs a GPU to run puts
that part in a function which nobody calls.
"""

from __future__ import annotations

import ast
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass

from mla_var3.errors import nearest
from mla_var3.lab.devlog.segments import Finding
from mla_var3.lab.knowledge.page import Fence, Page
from mla_var3.toolchain.sass import is_counted

ARCHS = ("sm_80", "sm_90", "sm_90a", "sm_100", "sm_100a", "sm_120a")
HOST = "host"
_PYTHON = ("python", "py", "python3")
#: What only device code has; in a block of another language it is kernel code that nobody compiles.
_DEVICE = re.compile(r"@(?:cute|ct|cutlass|triton)\.(?:kernel|jit)\b|\bcute\.arch\.\w+\(|\bct\.(?:load|store|mma)\(")


@dataclass(frozen=True)
class Block:
    """A Python block of a page. expect, absent: instruction groups. raises: (type, part of the message)."""

    line: int
    code: str
    arch: str
    expect: tuple[str, ...] = ()
    absent: tuple[str, ...] = ()
    raises: tuple[str, str] | None = None

    @property
    def kernels(self) -> tuple[str, ...]:
        """Device functions that the block defines."""
        return tuple(_decorated(self.code, "kernel"))

    @property
    def hosts(self) -> tuple[str, ...]:
        """Host functions and helpers that the block defines."""
        return tuple(_decorated(self.code, "jit"))

    @property
    def names(self) -> set[str]:
        """Every name that the block uses; a definition alone is no use."""
        return {node.id for node in ast.walk(ast.parse(self.code)) if isinstance(node, ast.Name)}


def _decorated(code: str, name: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.FunctionDef):
            for decorator in node.decorator_list:
                target = decorator.func if isinstance(decorator, ast.Call) else decorator
                if isinstance(target, ast.Attribute) and target.attr == name:
                    yield node.name


def blocks(page: Page) -> tuple[list[Block], list[Finding]]:
    """The Python blocks of a page, and what is wrong with its fenced blocks."""
    found: list[Block] = []
    findings: list[Finding] = []
    for fence in page.fences:
        if fence.language in _PYTHON:
            block, mistakes = _block(fence)
            findings += mistakes
            found += [block] if block is not None else []
        elif _DEVICE.search(fence.code):
            findings.append(Finding(fence.line, "kernel code in a block that is not ```python: nobody compiles it"))
    return found, findings


def _block(fence: Fence) -> tuple[Block | None, list[Finding]]:
    try:
        words = shlex.split(fence.info)[1:]
    except ValueError as error:
        return None, [Finding(fence.line, f"the words behind python cannot be read: {error}")]
    if not words or words[0] not in (*ARCHS, HOST):
        first = words[0] if words else ""
        want = nearest(first, [*ARCHS, HOST])
        return None, [Finding(fence.line, f"a python block names what it is compiled for, or host: {want}")]
    try:
        ast.parse(fence.code)
    except SyntaxError as error:
        return None, [Finding(fence.line + (error.lineno or 1), f"this is not Python: {error.msg}")]
    fields: dict[str, str] = {}
    for word in words[1:]:
        name, equals, value = word.partition("=")
        if not equals or name not in ("expect", "absent", "raises"):
            return None, [Finding(fence.line, f"{word!r} is unknown: {nearest(name, ['expect', 'absent', 'raises'])}")]
        fields[name] = value
    raises = fields.get("raises")
    kind, _, part = (raises or "").partition(":")
    block = Block(
        fence.line,
        fence.code,
        words[0],
        tuple(filter(None, fields.get("expect", "").split(","))),
        tuple(filter(None, fields.get("absent", "").split(","))),
        None if raises is None else (kind.strip(), part.strip()),
    )
    for name in (*block.expect, *block.absent):
        if not is_counted(name):
            return None, [Finding(fence.line, f"{name!r} is an instruction that nobody counts (toolchain/sass.py)")]
    if block.arch == HOST and (block.kernels or block.hosts or block.expect or block.absent):
        return None, [Finding(fence.line, "a host block compiles nothing: name an architecture for device code")]
    return block, []
