"""The loops of a kernel's SASS: basic blocks, dominators, back-edges, and the innermost loop that multiplies most.

A jump backwards alone is no loop: compilers put the retries of barrier waits behind the kernel's end and jump back from
there. A back-edge leads to a block that dominates its start, and a loop is everything that reaches that edge without
leaving through the head (Aho, Sethi and Ullman's natural loop).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from mla_var3.toolchain import sass as sass_
from mla_var3.toolchain.compiled import CompiledKernel

_LINE = re.compile(r"^\s*/\*([0-9a-f]{4,})\*/\s+(.+?)\s*;", re.MULTILINE)
_WORDS = re.compile(r"(?:(@!?U?P\w+)\s+)?([A-Z][A-Z0-9_]*(?:\.[A-Za-z0-9_]+)*)\s*(.*)", re.DOTALL)
_TENSOR = re.compile(r"(?:HG|QG|IG|H|Q|I|O|D)MMA|UTC\w*MMA")
_ADDRESS = re.compile(r"\b0x[0-9a-f]+\b")
#: Nothing is executed behind these, where no predicate stands before them.
_ENDS = ("EXIT", "RET", "BRX", "BRXU", "JMP", "JMX", "JMXU", "KILL", "BPT")


@dataclass(frozen=True)
class Instruction:
    """address: in bytes from the kernel's start. guard: "@P0", "@!UP1" or "". opcode: with its modifiers."""

    address: int
    guard: str
    opcode: str
    operands: str

    @property
    def name(self) -> str:
        """The opcode without modifiers."""
        return self.opcode.partition(".")[0]

    @property
    def is_tensor(self) -> bool:
        return _TENSOR.fullmatch(self.name) is not None

    @property
    def text(self) -> str:
        return f"{self.guard + ' ' if self.guard else ''}{self.opcode} {self.operands}".strip()

    @property
    def target(self) -> int | None:
        """Where a direct branch goes; None for all else."""
        if self.name not in ("BRA", "WARPSYNC"):
            return None
        found = _ADDRESS.findall(self.operands)
        return int(found[-1], 16) if found else None

    @property
    def always_jumps(self) -> bool:
        """A plain BRA: `BRA.DIV`, `BRA.U` and a predicate as operand are conditions."""
        return self.opcode == "BRA" and not self.guard and "," not in self.operands

    def normal(self) -> str:
        """Without registers, predicates and addresses: what two compilations of the same code share."""
        text = re.sub(r"\b(U?R|U?P|B|SB)(\d+|Z|T)\b", r"\1", self.operands)
        text = re.sub(r"`?\(\.L\w+\)", "label", text) if self.target is None else "label"
        return f"{'@P ' if self.guard else ''}{self.opcode} {text}".strip()


def instructions(sass: str) -> list[Instruction]:
    """The instructions of one kernel's part of a listing, in order."""
    found = []
    for match in _LINE.finditer(sass):
        words = _WORDS.match(match[2].strip())
        if words is not None:
            found.append(Instruction(int(match[1], 16), words[1] or "", words[2], " ".join(words[3].split())))
    return found


@dataclass(frozen=True)
class Loop:
    """start, end: addresses of its head and its last back-edge. body: its instructions in order of addresses; those
    outside of start..end (retries of waits) are `far` of them. tensor: products among them."""

    start: int
    end: int
    body: tuple[Instruction, ...] = field(repr=False)
    tensor: int

    @property
    def near(self) -> tuple[Instruction, ...]:
        """The part between head and back-edge: what runs when no wait has to be repeated."""
        return tuple(one for one in self.body if self.start <= one.address <= self.end)

    @property
    def far(self) -> int:
        return len(self.body) - len(self.near)

    def counts(self) -> Counter[str]:
        """Instructions of `near` by opcode; MUFU and the like by what they compute."""
        return Counter(
            ".".join(one.opcode.split(".")[:2]) if one.name in ("MUFU", "SHFL", "BAR", "SYNCS") else one.name
            for one in self.near
        )


def loops(code: Sequence[Instruction]) -> list[Loop]:
    """Every natural loop, by its head; loops of one head are one. Outer ones hold the inner ones' instructions."""
    if not code:
        return []
    starts, edges = _blocks(code)
    before = _dominators(len(starts), edges)
    ends = [*starts[1:], len(code)]
    found: dict[int, tuple[set[int], int]] = {}
    for tail, targets in edges.items():
        for head in targets:
            if _dominates(head, tail, before):
                body, latest = found.get(head, ({head}, 0))
                _reach(tail, head, edges, body)
                found[head] = (body, max(latest, code[ends[tail] - 1].address))
    made = []
    for head, (body, latest) in found.items():
        some = sorted((one for block in body for one in code[starts[block] : ends[block]]), key=lambda i: i.address)
        made.append(Loop(code[starts[head]].address, latest, tuple(some), sum(one.is_tensor for one in some)))
    return sorted(made, key=lambda loop: loop.start)


def inner_loops(sass: str) -> list[Loop]:
    """Loops with tensor-core products that hold no other such loop, those with most products first.

    A warp-specialised kernel has one for each role that multiplies. Without any product in a loop: the largest
    innermost loops, so that a join or a copy has one too.
    """
    return innermost(loops(instructions(sass)))


def innermost(every: Sequence[Loop]) -> list[Loop]:
    """Of a kernel's loops those that `inner_loops` gives."""
    multiplying = [loop for loop in every if loop.tensor]
    pool = multiplying or every
    heads = {loop.start: {one.address for one in loop.body} for loop in pool}
    inner = [loop for loop in pool if not any(other != loop.start and other in heads[loop.start] for other in heads)]
    return sorted(inner, key=lambda loop: (-loop.tensor, -len(loop.near), loop.start))


def main_function(sass: str) -> tuple[str, str]:
    """(name, SASS) of the kernel of a listing with the most products, of those without any the longest."""
    parts = sass_.functions(sass) or {"": sass}

    def weight(name: str) -> tuple[int, int]:
        code = instructions(parts[name])
        return sum(one.is_tensor for one in code), len(code)

    best = max(parts, key=weight)
    return best, parts[best]


def main_code(compiled: CompiledKernel) -> tuple[str, str, Mapping[str, Path]] | None:
    """(name, SASS, artefacts) of the kernel of a call with the most products; None where no SASS was kept."""
    best: tuple[tuple[int, int], str, str, Mapping[str, Path]] | None = None
    for stage in compiled.stages or (compiled,):
        kept = {**compiled.artefacts, **stage.artefacts}
        if "sass" not in kept:
            continue
        name, text = main_function(kept["sass"].read_text(encoding="utf-8"))
        code = instructions(text)
        weight = (sum(one.is_tensor for one in code), len(code))
        if best is None or weight > best[0]:
            best = (weight, name, text, kept)
    return None if best is None else best[1:]


# ---------------------------------------------------------------- control flow
def _blocks(code: Sequence[Instruction]) -> tuple[list[int], Mapping[int, set[int]]]:
    """(index of each block's first instruction, successors of each block)."""
    at = {one.address: index for index, one in enumerate(code)}
    leaders = {0}
    for index, one in enumerate(code):
        jumps = one.target is not None or one.name in (*_ENDS, "CALL", "BSYNC", "BREAK")
        if one.target in at:
            leaders.add(at[one.target])
        if jumps and index + 1 < len(code):
            leaders.add(index + 1)
    starts = sorted(leaders)
    number = {start: block for block, start in enumerate(starts)}
    ends = [*starts[1:], len(code)]
    edges: dict[int, set[int]] = {}
    for block, end in enumerate(ends):
        last = code[end - 1]
        targets = {number[at[last.target]]} if last.target in at else set()
        stops = last.always_jumps or (last.name in _ENDS and not last.guard)
        if not stops and block + 1 < len(starts):
            targets.add(block + 1)
        edges[block] = targets
    return starts, edges


def _dominators(count: int, edges: Mapping[int, set[int]]) -> Mapping[int, int]:
    """The immediate dominator of each block; -1 is the entry above all.

    Blocks that no direct edge reaches are where an indirect branch or a call goes: each hangs on the entry. So does the
    first block of a loop that only an indirect branch enters. Cooper, Harvey and Kennedy's iteration.
    """
    entered = {target for targets in edges.values() for target in targets}
    roots = [0, *(block for block in range(1, count) if block not in entered)]
    order: list[int] = []
    seen: set[int] = set()
    for root in [*roots, *range(count)]:
        if root in seen:
            continue
        if root not in roots:
            roots.append(root)
        seen.add(root)
        stack: list[tuple[int, Iterator[int]]] = [(root, iter(sorted(edges[root])))]
        while stack:
            block, rest = stack[-1]
            following = next((target for target in rest if target not in seen), None)
            if following is None:
                order.append(block)
                stack.pop()
            else:
                seen.add(following)
                stack.append((following, iter(sorted(edges[following]))))
    position = {block: index for index, block in enumerate(reversed(order))} | {-1: -1}
    above: dict[int, list[int]] = {block: [] for block in range(count)}
    for block, targets in edges.items():
        for target in targets:
            above[target].append(block)
    for root in roots:
        above[root].append(-1)
    best: dict[int, int] = {-1: -1}
    changed = True
    while changed:
        changed = False
        for block in sorted(above, key=lambda b: position[b]):
            known = [one for one in above[block] if one in best]
            if not known:
                continue
            meeting = known[0]
            for other in known[1:]:
                meeting = _meet(meeting, other, best, position)
            if best.get(block) != meeting:
                best[block], changed = meeting, True
    return best


def _meet(one: int, two: int, best: Mapping[int, int], position: Mapping[int, int]) -> int:
    """The nearest block that dominates both."""
    while one != two:
        while position[one] > position[two]:
            one = best[one]
        while position[two] > position[one]:
            two = best[two]
    return one


def _dominates(head: int, block: int, before: Mapping[int, int]) -> bool:
    """Whether every way to `block` passes `head`."""
    while block != -1:
        if block == head:
            return True
        block = before[block]
    return False


def _reach(tail: int, head: int, edges: Mapping[int, set[int]], body: set[int]) -> None:
    """Adds every block from which `tail` is reached without passing `head`."""
    above: dict[int, list[int]] = {}
    for block, targets in edges.items():
        for target in targets:
            above.setdefault(target, []).append(block)
    stack = [tail]
    while stack:
        block = stack.pop()
        if block not in body:
            body.add(block)
            stack += above.get(block, [])
