"""Running a grid: block after block, in an order that a seed shuffles.

A block that waits for another one (a `while` loop that reads what it read the turn before) lets the others run: it is
left in a thread of its own and goes on when they have run or wait too. When all that are left wait, and each would do
the same for ever because nothing changes memory any more, the launch is a `KernelFault` that names the loop.
"""

from __future__ import annotations

import itertools
import random
import threading
import warnings
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from mla_var3.cutile_cpu import frontend
from mla_var3.cutile_cpu.batch import Batches
from mla_var3.cutile_cpu.errors import KernelFault, TooLarge, UndeterminedPadding, WrongType, WrongValue
from mla_var3.cutile_cpu.machine import BlockState, Program
from mla_var3.cutile_cpu.memory import Memory
from mla_var3.cutile_cpu.settings import own_settings
from mla_var3.cutile_cpu.waiting import Abandoned

#: cuTile's own limit of an axis of the grid.
MAX_BLOCKS = (1 << 24) - 1


def launch(
    grid: Sequence[int],
    kernel: Any,
    args: Sequence[Any],
    *excess: Any,
    seed: int | None = 0,
    poison: bool = True,
    strict: bool = True,
    arch: str | None = None,
) -> None:
    """Runs a `@ct.kernel` over `grid` (up to 3 extents) with CPU tensors, to the end.

    seed: of the order of blocks; None runs them in order. poison: undetermined padding is NaN (a large number for
    integers), else zero. strict: a tile wholly outside its array, which cuTile leaves undefined, is a fault; else it is
    padding, and storing it does nothing. arch: an architecture (`sm_90`); data types that it lacks are refused.

    Raises `KernelFault` (a `Misuse`) for what cuTile leaves undefined and for failed assertions, with the kernel's
    line; cuTile's own errors for code that its front end refuses; for a wrong call a `Misuse` that is also the
    TypeError, ValueError or OverflowError of `ct.launch`. Warns (`UndeterminedPadding`) where such padding has made an
    argument NaN.
    """
    frontend.check_version()
    if excess:
        raise WrongType("cutile_cpu.launch takes (grid, kernel, args) and no stream: leave the stream out.")
    extents = checked(grid, args)
    with own_settings():
        _run(extents, kernel, args, seed, poison, strict, arch)


def _run(
    extents: tuple[int, int, int],
    kernel: Any,
    args: Sequence[Any],
    seed: int | None,
    poison: bool,
    strict: bool,
    arch: str | None,
) -> None:
    arguments = frontend.describe_arguments(kernel, args)
    program = frontend.program(kernel, arguments, arch)
    memory = Memory(fill=poison, strict=strict, watch=program.can_wait)
    for tensor, name in arguments.tensors:
        memory.add(tensor, name)
    x, y, z = extents
    blocks = [(i, j, k) for k, j, i in itertools.product(range(z), range(y), range(x))]
    if seed is not None:
        random.Random(seed).shuffle(blocks)
    _Schedule(program, arguments, memory, extents).run(blocks)
    found = memory.poisoned()
    if found is not None:
        name, loads = found
        warnings.warn(
            f"{name} holds NaN after {program.name}, which loaded padding that cuTile leaves undetermined, at "
            f"{'; at '.join(loads)}: give the load a padding_mode, or launch with poison=False, where it is zero.",
            UndeterminedPadding,
            stacklevel=1,
        )


def checked(grid: Any, args: Any) -> tuple[int, int, int]:
    """The grid's three extents; the refusals of `ct.launch`, with its types of errors."""
    if not isinstance(grid, (tuple, list)):
        raise WrongType(f"grid is a {type(grid).__name__}: give a tuple of up to 3 numbers of blocks.")
    if not isinstance(args, (tuple, list)):
        raise WrongType(f"args is a {type(args).__name__}: give a tuple of the kernel's arguments.")
    if len(grid) > 3:
        raise WrongValue(f"grid = {tuple(grid)}: give up to 3 numbers of blocks.")
    for n in grid:
        if not isinstance(n, int):
            raise WrongType(f"grid = {tuple(grid)}: give up to 3 numbers of blocks, not a {type(n).__name__}.")
        if n < 0:
            raise TooLarge(f"grid = {tuple(grid)}: give up to 3 numbers of blocks, none of them negative.")
        if n > MAX_BLOCKS:
            raise WrongValue(f"grid = {tuple(grid)}: cuTile takes at most {MAX_BLOCKS} blocks along an axis.")
    x, y, z = (*grid, 1, 1, 1)[:3]
    return x, y, z


class _Schedule:
    """Runs blocks one at a time; those that wait are parked in threads."""

    def __init__(self, program: Program, arguments: Any, memory: Memory, grid: tuple[int, int, int]) -> None:
        self.program, self.arguments, self.memory, self.grid = program, arguments, memory, grid
        self.parked: deque[_Waiting] = deque()

    def state(self, bid: tuple[int, int, int], wait: Callable[[str, bool], None] | None) -> BlockState:
        return BlockState(bid, self.grid, self.memory, self.arguments.lists, wait)

    def execute(self, state: BlockState) -> None:
        self.program.execute(state, self.arguments.values)

    def run(self, blocks: list[tuple[int, int, int]]) -> None:
        # Only a kernel with a `while` loop can wait; the others need no threads.
        if not self.program.can_wait:
            batches = Batches(self.program, self.arguments, self.memory, self.grid)
            for bid in batches.run(blocks):
                self.execute(self.state(bid, None))
            return
        try:
            for bid in blocks:
                self.parked.append(_Waiting(self, bid))
                self._last_goes_on()
            while self.parked:
                for _ in range(len(self.parked)):
                    self.parked.rotate(-1)
                    self._last_goes_on()
                self._look_for_the_end()
        finally:
            for block in self.parked:
                block.give_up()

    def _last_goes_on(self) -> None:
        """Lets the last block in the queue run. It stays there meanwhile: an interrupt gives up all that are in it."""
        if not self.parked[-1].turn():
            self.parked.pop()

    def _look_for_the_end(self) -> None:
        if self.parked and all(block.circles_at == self.memory.changes for block in self.parked):
            first = self.parked[0]
            many = f" ({len(self.parked)} blocks wait)" if len(self.parked) > 1 else ""
            raise KernelFault(f"the loop never ends: nothing that it reads changes{many},", first.where, first.bid)


class _Waiting:
    """One block in a thread that runs only while it has the turn. circles_at: `Memory.changes` for which its loop is
    known to do the same for ever."""

    def __init__(self, schedule: _Schedule, bid: tuple[int, int, int]) -> None:
        self.schedule, self.bid, self.where = schedule, bid, ""
        self.state = schedule.state(bid, self._wait)
        self.circles_at = -1
        self.error: BaseException | None = None
        self.done = False
        self._mine, self._theirs = threading.Semaphore(0), threading.Semaphore(0)
        self._thread: threading.Thread | None = None

    def turn(self) -> bool:
        """Lets the block run until it ends (False) or waits (True)."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._body, daemon=True)
            self._thread.start()
        else:
            self._mine.release()
        while not self._theirs.acquire(timeout=0.2):
            pass  # an interrupt that is no signal to this thread is seen between two waits
        if self.done:
            self._thread.join()
        if self.error is not None:
            raise self.error
        return not self.done

    def _body(self) -> None:
        self.schedule.memory.trace = None
        try:
            with own_settings():
                self.schedule.execute(self.state)
        except Abandoned:
            pass
        except BaseException as error:
            self.error = error
        self.done = True
        self._theirs.release()

    def _wait(self, where: str, circles: bool) -> None:
        trace, self.where = self.schedule.memory.trace, where
        self.circles_at = self.schedule.memory.changes if circles else -1
        self._theirs.release()
        self._mine.acquire()
        if self.state.abandoned:
            raise Abandoned
        self.schedule.memory.trace = trace

    def give_up(self) -> None:
        """Ends the block's thread, which waits, or runs when the launch was interrupted."""
        self.state.abandoned = True
        self._mine.release()
        if self._thread is not None:
            self._thread.join()
