"""A traced copy of a CuTe DSL kernel: what its warps do, with time stamps, in a buffer in global memory.

Nothing in a kernel's source knows of it. While `tracing` is active, the DSL's functions that wait (for mbarriers, named
barriers, WGMMA groups, cp.async groups, clusters, the launch before) and the `@cute.jit` functions that a kernel calls
are wrapped, so that a kernel which is compiled meanwhile also stores when each of them begins and ends. Otherwise the
same source compiles to the code that it always had.

One lane of each warp stores, and each warp has a slot of its own, so that no warp waits for another one. A place of the
slot has eight bytes. Where a warp's slot lies and how many places it has used are two PTX registers, which are declared
where the kernel begins and which the compiler above ptxas does not see: they are carried through loops and branches
without being an argument of any of them. The buffer's address is a constant of the code. An event takes eight
instructions. One that finds no room is counted, and not stored.

    place 0, 1            the kernel's begin: global timer (ns, 64 bits), clock, SM
    place 2, 3            its end: global timer, clock, places used and needed
    place 4 ..            events: clock; bits 0..15 number of the event, bit 30 a mark, bit 31 an end

CuTe DSL has a tracer of its own (IKET). It tells 31 events of a kernel apart, of which a version here has more than a
hundred, and it runs the program twice under a library that patches the machine code when it is loaded.

Clocks are the low words of the SM's counter of cycles. A time stamp is taken where the warp issues it. ptxas keeps time
stamps and memory operations in order, and may move arithmetic over a time stamp.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import linecache
import math
import re
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from mla_var3.errors import UserError
from mla_var3.toolchain import loader

if TYPE_CHECKING:
    from mla_var3.toolchain.compiled import CompiledKernel

PLACE = 8  # bytes
HEADER = 4  # places ahead of the events
MARK, END = 1 << 30, 1 << 31
NUMBER = (1 << 16) - 1
ASIDE = 1 << 30  # where lanes begin to count that store nothing
LARGEST = 1 << 32  # bytes of a buffer: offsets have 32 bits
#: Operations of a function's body below which it gets no range: its time stamps would take as long as it does.
FEW = 100

#: Kinds of events: a function that runs; a wait; a mark, that WGMMAs have been issued and committed as a group.
RANGE, WAIT, ISSUE = "range", "wait", "issue"
#: What waits, by the module that kernels call it from, and what a wait is called. The name of a barrier is added.
_WAITS = {
    "cutlass.cute.arch": {
        "mbarrier_wait": "wait",
        "barrier": "wait",
        "sync_threads": "wait CTA",
        "cluster_wait": "wait cluster",
        "griddepcontrol_wait": "wait launch before",
        "cp_async_wait_group": "wait cp.async",
        "setmaxregister_increase": "wait registers",
    },
    "cutlass.cute.nvgpu.warpgroup": {"wait_group": "wait products"},
}
_COMMIT = ("cutlass.cute.nvgpu.warpgroup", "commit_group")
_ASSEMBLY = ("cutlass._mlir.dialects.llvm", "inline_asm")
_REDUCES = re.compile(r"barrier\.cta\.red[\w.]* \w+, (\d+)")
#: Parts of an expression that do not say which barrier it is.
_DULL = {"self", "storage", "data_ptr", "iterator"}


@dataclass(frozen=True)
class Event:
    """Something that a warp does. kind: `RANGE`, `WAIT` or `ISSUE`. where: file and line of the call or the function.
    left: of a wait for WGMMAs, how many groups may still be in flight behind it; else -1."""

    kind: str
    name: str
    where: str = ""
    left: int = -1


@dataclass(frozen=True)
class Region:
    """One kernel's part of the buffer. offset: bytes. ctas: that have slots, from the first one on. warps: of a CTA."""

    kernel: str
    offset: int
    ctas: int
    warps: int


@dataclass
class Recorder:
    """What is traced, and where it goes.

    base: address of the buffer. size: its bytes. capacity: places of a warp. most_ctas: of a kernel, that have slots.
    functions: modules, or packages, whose `@cute.jit` functions get ranges, as do those of a kernel's own module.
    waits: functions that wait, without one of the DSL's waits, and what their waits are called.
    """

    base: int
    size: int
    capacity: int = 8192
    most_ctas: int = 264
    functions: tuple[str, ...] = ()
    waits: Mapping[str, str] = field(default_factory=dict)
    events: list[Event] = field(default_factory=list)
    regions: list[Region] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)  # kernels for which the buffer had no room
    compiled: list[CompiledKernel] = field(default_factory=list)  # host functions of what was planned
    _numbers: dict[Event, int] = field(default_factory=dict)
    _module: str | None = None  # of the kernel that is being compiled

    def __post_init__(self) -> None:
        if self.capacity <= HEADER or self.size > LARGEST or self.base % 16:
            raise ValueError(f"capacity = {self.capacity}, size = {self.size:,}, base = {self.base:#x} is no buffer")

    @property
    def stride(self) -> int:
        """Bytes of a warp's slot."""
        return self.capacity * PLACE

    # ------------------------------------------------------------------------------------ while a kernel is compiled
    def number(self, event: Event) -> int:
        if event not in self._numbers:
            if len(self.events) > NUMBER:
                raise UserError(f"the kernel has over {NUMBER:,} different events, more than a trace tells apart.")
            self._numbers[event] = len(self.events)
            self.events.append(event)
        return self._numbers[event]

    def region(self, kernel: str, grid: Any, block: Any) -> Region | None:
        """The next kernel's part of the buffer; None where there is no room for a CTA."""
        warps = -(-(_product(block) or 1024) // 32)
        used = sum(one.ctas * one.warps for one in self.regions) * self.stride
        ctas = min(_product(grid) or self.most_ctas, self.most_ctas, (self.size - used) // (warps * self.stride))
        if ctas < 1:
            self.left_out.append(kernel)
            return None
        self.regions.append(Region(kernel, used, ctas, warps))
        return self.regions[-1]

    def emit(self, event: Event, flags: int = 0) -> Any:
        """A time stamp at this place of the kernel; returns its operation."""
        return _assembly(_event_text(self.number(event) | flags, self.base, self.capacity))

    def span(self, event: Event, call: Callable[[], Any], few: int = 0) -> Any:
        """What `call` returns, between two time stamps; without them where it makes fewer than `few` operations."""
        first = self.emit(event)
        result = call()
        if few and _is_short(first, few):
            first.operation.erase()
        else:
            self.emit(event, END)
        return result


def _product(sizes: Any) -> int | None:
    """Of a grid or block; None where a size is known at a launch only."""
    values = tuple(sizes) if isinstance(sizes, Sequence) else (sizes,)
    return math.prod(values) if all(isinstance(value, int) for value in values) else None


def _is_short(first: Any, few: int) -> bool:
    """Whether fewer than `few` operations follow `first` in its block, those inside of others counted too."""

    def inside(block: Any) -> Iterator[Any]:
        for operation in block.operations:
            yield operation
            for region in operation.regions:
                for deeper in region.blocks:
                    yield from inside(deeper)

    behind = 0
    for operation in inside(first.operation.block):
        behind += behind > 0 or operation == first
        if behind > few:
            return False
    return True


# ---------------------------------------------------------------- PTX
def _assembly(text: str) -> Any:
    from cutlass._mlir.dialects import llvm

    return llvm.inline_asm(
        None, [], text, "~{memory}", has_side_effects=True, is_align_stack=False, asm_dialect=llvm.AsmDialect.AD_ATT
    )


def _linear(to: str, index: str) -> str:
    """A three-dimensional index as one number, x fastest; takes the registers a and b."""
    return f"""mov.u32 {to}, %{index}.z;
mov.u32 a, %n{index}.y;
mov.u32 b, %{index}.y;
mad.lo.u32 {to}, {to}, a, b;
mov.u32 a, %n{index}.x;
mov.u32 b, %{index}.x;
mad.lo.u32 {to}, {to}, a, b;"""


def _begin_text(region: Region, base: int, capacity: int) -> str:
    """Declares the registers, and writes the begin. Lanes that store nothing count from `ASIDE` on."""
    return f"""
.reg .b32 trace_slot, trace_used;
{{
.reg .pred active;
.reg .b32 a, b, c, slot, lane, sm, clk;
.reg .b64 at, time;
{_linear("slot", "ctaid")}
setp.lt.u32 active, slot, {region.ctas};
{_linear("c", "tid")}
and.b32 lane, c, 31;
setp.eq.and.u32 active, lane, 0, active;
shr.u32 c, c, 5;
mad.lo.u32 slot, slot, {region.warps}, c;
mad.lo.u32 trace_slot, slot, {capacity * PLACE}, {region.offset};
selp.u32 trace_used, {HEADER}, {ASIDE}, active;
cvt.u64.u32 at, trace_slot;
add.u64 at, at, {base};
mov.u64 time, %globaltimer;
mov.u32 clk, %clock;
mov.u32 sm, %smid;
mov.b64 {{a, b}}, time;
@active st.global.v4.b32 [at], {{a, b, clk, sm}};
}}"""


def _event_text(word: int, base: int, capacity: int) -> str:
    return f"""{{
.reg .pred room;
.reg .b32 clk, offset, event;
.reg .b64 at;
mov.u32 clk, %clock;
setp.lt.u32 room, trace_used, {capacity};
mad.lo.u32 offset, trace_used, {PLACE}, trace_slot;
cvt.u64.u32 at, offset;
add.u64 at, at, {base};
mov.u32 event, {word};
@room st.global.v2.b32 [at], {{clk, event}};
add.u32 trace_used, trace_used, 1;
}}"""


def _end_text(base: int) -> str:
    return f"""{{
.reg .pred active;
.reg .b32 a, b, clk;
.reg .b64 at, time;
setp.lt.u32 active, trace_used, {ASIDE};
cvt.u64.u32 at, trace_slot;
add.u64 at, at, {base};
mov.u64 time, %globaltimer;
mov.u32 clk, %clock;
mov.b64 {{a, b}}, time;
@active st.global.v4.b32 [at+{2 * PLACE}], {{a, b, clk, trace_used}};
}}"""


# ---------------------------------------------------------------- wrapping what a kernel calls
@contextlib.contextmanager
def tracing(recorder: Recorder) -> Iterator[Recorder]:
    """Kernels that are compiled meanwhile are traced, and those that are planned are compiled anew. `recorder` then has
    their events."""
    from cutlass.base_dsl.dsl import BaseDSL
    from cutlass.cutlass_dsl.cutlass import KernelLauncher

    from mla_var3.toolchain import aot

    with contextlib.ExitStack() as stack:

        def wrap(owner: Any, name: str, wrapper: Callable[[Recorder, Any], Any]) -> None:
            before = getattr(owner, name)
            stack.callback(setattr, owner, name, before)
            setattr(owner, name, functools.wraps(before)(wrapper(recorder, before)))

        for module, functions in _WAITS.items():
            for name, said in functions.items():
                wrap(importlib.import_module(module), name, functools.partial(_waiting, said=said))
        wrap(importlib.import_module(_COMMIT[0]), _COMMIT[1], _issuing)
        wrap(importlib.import_module(_ASSEMBLY[0]), _ASSEMBLY[1], _assembling)
        wrap(BaseDSL, "_func", _calling)
        wrap(KernelLauncher, "launch", _launching)
        # Neither a cache nor a bundle: what they have is not traced, and what is traced must not go there.
        wrap(aot, "compiled_host", _compiling)
        yield recorder


def _compiling(recorder: Recorder, function: Any) -> Any:
    def compiled(plan: Any, name: str, compile_fn: Any, **options: Any) -> CompiledKernel:
        found: CompiledKernel = compile_fn(options.get("tiling") or plan.tiling, options.get("device") or plan.device)
        recorder.compiled.append(found)
        if not hasattr(found.handle, "export_to_c"):
            return found
        # Loaded as every other kernel is, from a library: what is called differs in its code alone.
        with tempfile.TemporaryDirectory(prefix="trace-") as scratch:
            library = Path(scratch) / "traced.so"
            try:
                loader.link(found.handle, name, library)
            except loader.CannotLink:
                return found
            return replace(found, handle=loader.load(library, name))

    return compiled


def _launching(recorder: Recorder, function: Any) -> Any:
    def launch(launcher: Any, *args: Any, **options: Any) -> Any:
        body = launcher.funcBody
        region = recorder.region(body.__name__, options.get("grid"), options.get("block"))
        if region is None:
            return function(launcher, *args, **options)

        @functools.wraps(body)
        def traced(*inner: Any, **named: Any) -> Any:
            _assembly(_begin_text(region, recorder.base, recorder.capacity))
            recorder._module = body.__module__
            try:
                result = body(*inner, **named)
            finally:
                recorder._module = None
            _assembly(_end_text(recorder.base))
            return result

        launcher.funcBody = traced
        return function(launcher, *args, **options)

    return launch


def _calling(recorder: Recorder, function: Any) -> Any:
    def call(dsl: Any, body: Any, *args: Any, **options: Any) -> Any:
        def plain() -> Any:
            return function(dsl, body, *args, **options)

        module = getattr(body, "__module__", "")
        if recorder._module is None or not _is_in(module, (recorder._module, *recorder.functions)):
            return plain()
        where = f"{_short(body.__code__.co_filename)}:{body.__code__.co_firstlineno}"
        if body.__name__ in recorder.waits:
            return recorder.span(Event(WAIT, recorder.waits[body.__name__], where), plain)
        return recorder.span(Event(RANGE, body.__name__, where), plain, FEW)

    return call


def _waiting(recorder: Recorder, function: Any, said: str) -> Any:
    def wait(*args: Any, **options: Any) -> Any:
        if recorder._module is None:
            return function(*args, **options)
        where, text = _call_site(sys._getframe(1))
        name, left = said, -1
        if function.__name__ == "barrier":
            name = f"{said} {_barrier_name(recorder._module, options.get('barrier_id'), text)}"
        elif function.__name__ == "mbarrier_wait":
            name = f"{said} {_mbarrier_name(text)}"
        elif function.__name__ == "wait_group" and args:
            left = int(args[0])
        return recorder.span(Event(WAIT, name, where, left), lambda: function(*args, **options))

    return wait


def _assembling(recorder: Recorder, function: Any) -> Any:
    def assemble(*args: Any, **options: Any) -> Any:
        texts = (value for value in (*args, *options.values()) if isinstance(value, str))
        reduces = next(filter(None, map(_REDUCES.search, texts)), None) if recorder._module is not None else None
        if reduces is None:
            return function(*args, **options)
        where, _ = _call_site(sys._getframe(1))
        event = Event(WAIT, f"wait {_barrier_name(recorder._module, int(reduces[1]))}", where)
        return recorder.span(event, lambda: function(*args, **options))

    return assemble


def _issuing(recorder: Recorder, function: Any) -> Any:
    def commit(*args: Any, **options: Any) -> Any:
        result = function(*args, **options)
        if recorder._module is not None:
            where, _ = _call_site(sys._getframe(1))
            recorder.emit(Event(ISSUE, "products issued", where), MARK)
        return result

    return commit


def _is_in(module: str, packages: Sequence[str]) -> bool:
    return any(module == name or module.startswith(f"{name}.") for name in packages)


# ---------------------------------------------------------------- names
def _barrier_name(module: str | None, number: Any, text: str = "") -> str:
    """Of a named barrier, from the `Barrier` enumeration of the kernel's module. text: of the line that waits."""
    if number is None:
        return "CTA"
    if not isinstance(number, int):  # known to the kernel only; `EVEN + me` of `Barrier.EVEN + self.me`
        match = re.search(r"(?:barrier_id=|named_sync\()\s*([^,()]+)", text)
        return match[1].replace("Barrier.", "").replace("self.", "").strip() if match else "barrier"
    names = {int(one): one.name for one in getattr(sys.modules.get(module or ""), "Barrier", ())}
    return names.get(number, f"barrier {number}")


def _mbarrier_name(text: str) -> str:
    """`full` of `cute.arch.mbarrier_wait(storage.full.data_ptr() + last, 0)`."""
    match = re.search(r"mbarrier_wait\(\s*([\w.]+)", text)
    parts = [part for part in match[1].split(".") if part not in _DULL] if match else []
    return parts[0] if parts else "mbarrier"


def _call_site(frame: FrameType | None) -> tuple[str, str]:
    """(file and line, the line's text) of the kernel code that waits, behind primitives; ("", "") where there is
    none."""
    found = "", ""
    while frame is not None:
        name = frame.f_code.co_filename
        if "site-packages" not in name and name != __file__:
            found = f"{_short(name)}:{frame.f_lineno}", linecache.getline(name, frame.f_lineno).strip()
            if "/prims/" not in name:
                return found
        frame = frame.f_back
    return found


def _short(name: str) -> str:
    return name.rpartition("/")[2]
