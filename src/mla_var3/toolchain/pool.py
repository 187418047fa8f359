"""Many compilations at once, in worker processes: one job that fails or crashes costs no other."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from mla_var3.errors import UserError
from mla_var3.files import no_space
from mla_var3.toolchain import mistakes
from mla_var3.toolchain.compiled import CompiledKernel

_KEPT_OUTPUT = 2000  # characters of what a crashed worker had printed


@dataclass(frozen=True)
class CompileResult:
    """Outcome of one job: `compiled`, or why not.

    error: one line for a `UserError`, message, place and line of a mistake in the kernel's code, the last line of the
    traceback or the crash otherwise; "" when compiled.
    error_type: class name of the exception ("Infeasible", "Unsupported", ...), "Crash" or "Timeout".
    details: the traceback, or what the crashed worker had printed.
    """

    job: Any
    compiled: CompiledKernel | None = None
    error: str = ""
    error_type: str = ""
    details: str = ""
    seconds: float = 0.0

    @property
    def ok(self) -> bool:
        return not self.error_type


def compile_many(
    jobs: Sequence[Any],
    workers: int | None = None,
    progress: bool = True,
    *,
    timeout_s: float | None = None,
    run: Callable[[Any], Any],
) -> list[CompileResult]:
    """Runs the jobs in freshly started processes and returns their results in the jobs' order.

    workers: processes, at most one a job; None is one a core. progress: a bar on a terminal, else a few lines,
    on standard error. timeout_s: longest a single job may take. run: what a worker calls with the job; importable by
    name.
    """
    if workers is not None and workers < 1:
        raise UserError(f"workers is {workers}: give at least 1.")
    jobs = list(jobs)
    if not jobs:
        return []
    count = min(workers or len(os.sched_getaffinity(0)), len(jobs))
    results: dict[int, CompileResult] = {}
    with progress_of(len(jobs), progress) as tell, tempfile.TemporaryDirectory(prefix="compile-") as scratch:
        queue = deque(enumerate(jobs))
        pool = [_Worker(run, Path(scratch) / f"{slot}.log") for slot in range(count)]
        try:
            while len(results) < len(jobs):
                for worker in pool:
                    if worker.index is None and queue:
                        worker.give(*queue.popleft())
                for worker in _finished(pool, timeout_s):
                    index, result = worker.take(timeout_s)
                    results[index] = result
                    tell(result)
                    if result.details and mistakes.wanted():
                        print(result.details, file=sys.stderr)
        finally:
            for worker in pool:
                worker.stop()
    return [results[index] for index in range(len(jobs))]


class _Worker:
    """One process that runs one job at a time, and is replaced when it dies."""

    def __init__(self, run: Callable[[Any], Any], log: Path) -> None:
        self.run, self.log = run, log
        self.index: int | None = None
        self.job: Any = None
        self.started = 0.0
        self.process: Any = None
        self.pipe: Connection | None = None

    def give(self, index: int, job: Any) -> None:
        if self.process is None:
            context = multiprocessing.get_context("spawn")
            self.pipe, theirs = context.Pipe()
            self.process = context.Process(target=_serve, args=(theirs, self.run, str(self.log)), daemon=True)
            self.process.start()
            theirs.close()
        self.index, self.job, self.started = index, job, time.perf_counter()
        assert self.pipe is not None
        # A worker that died in between is found out by take().
        with contextlib.suppress(BrokenPipeError):
            self.pipe.send(job)

    def late(self, timeout_s: float | None) -> bool:
        """Whether the job at hand has had its time."""
        return timeout_s is not None and time.perf_counter() - self.started > timeout_s

    def take(self, timeout_s: float | None) -> tuple[int, CompileResult]:
        """The result of the job at hand, and a free worker."""
        assert self.index is not None and self.pipe is not None
        index, job, late, seconds = self.index, self.job, self.late(timeout_s), time.perf_counter() - self.started
        self.index = None
        try:
            if self.pipe.poll():
                return index, replace(self.pipe.recv(), job=job, seconds=seconds)
        except (EOFError, OSError):
            pass
        if late and self.process.is_alive():
            error, kind = f"took longer than {timeout_s:g} s", "Timeout"
        else:
            self.process.join()
            code = self.process.exitcode
            error, kind = f"the compiling process died ({_exit_name(code)})", "Crash"
        self.stop()
        printed = self.log.read_text(errors="replace") if self.log.exists() else ""
        return index, CompileResult(job, None, error, kind, printed[-_KEPT_OUTPUT:].strip(), seconds)

    def stop(self) -> None:
        if self.pipe is not None:
            self.pipe.close()
        if self.process is not None:
            if self.process.is_alive():
                self.process.kill()
            self.process.join()
        self.process = self.pipe = None


def _finished(pool: Sequence[_Worker], timeout_s: float | None) -> list[_Worker]:
    """Waits until a busy worker has answered, died or run out of time."""
    busy = [worker for worker in pool if worker.index is not None]
    handles: dict[Any, _Worker] = {}
    for worker in busy:
        handles[worker.pipe] = worker
        handles[worker.process.sentinel] = worker
    ready = {id(handles[handle]): handles[handle] for handle in wait(list(handles), None if timeout_s is None else 0.2)}
    for worker in busy:
        if worker.late(timeout_s):
            ready[id(worker)] = worker
    return list(ready.values())


def _serve(pipe: Connection, run: Callable[[Any], Any], log: str) -> None:
    """Body of a worker: answers every job with a result, until the pipe closes."""
    # Compilers write to the file descriptors themselves; a crash report is the last of what they wrote.
    descriptor = os.open(log, os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    with contextlib.suppress(EOFError, KeyboardInterrupt):
        while True:
            job = pipe.recv()
            os.ftruncate(descriptor, 0)
            os.lseek(descriptor, 0, os.SEEK_SET)
            pipe.send(_attempt(run, job))


def _attempt(run: Callable[[Any], Any], job: Any) -> CompileResult:
    import traceback

    try:
        return CompileResult(None, run(job))
    except UserError as error:
        return CompileResult(None, None, str(error), type(error).__name__)
    except Exception as error:
        if isinstance(error, OSError) and (full := no_space(error)) is not None:
            return CompileResult(None, None, full, UserError.__name__)
        mistake = mistakes.mistake_of(error)
        if mistake is None:
            return CompileResult(None, None, mistakes.sentence(error), type(error).__name__, traceback.format_exc())
        details = "".join(traceback.format_exception(mistake.original))
        return CompileResult(None, None, str(mistake), mistake.kind, details)


def _exit_name(code: int | None) -> str:
    import signal

    if code is not None and code < 0:
        with contextlib.suppress(ValueError):
            return f"signal {-code}, {signal.Signals(-code).name}"
    return f"exit status {code}"


def milestone(done: int, total: int) -> bool:
    """Whether this step of `total` is said for those before it too: the first, and four more, or every twentieth."""
    most = max(4, total // 20)
    return done == 1 or done * most // total > (done - 1) * most // total


@contextlib.contextmanager
def progress_of(total: int, wanted: bool) -> Iterator[Callable[[CompileResult], None]]:
    """A function to call with each result: it moves a bar on a terminal and prints a line elsewhere."""
    if not wanted:
        yield lambda result: None
        return
    if not sys.stderr.isatty():
        done = 0

        def line(result: CompileResult) -> None:
            nonlocal done
            done += 1
            if milestone(done, total) or not result.ok:
                print(f"[{done}/{total}] {_describe(result)}", file=sys.stderr, flush=True)

        yield line
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("compiling"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task("compiling", total=total)

        def move(result: CompileResult) -> None:
            if not result.ok:
                bar.console.print(_describe(result), markup=False, highlight=False)
            bar.advance(task)

        yield move


def _describe(result: CompileResult) -> str:
    label = getattr(result.job, "label", None) or str(result.job)
    # Whoever asked says why, once all are done.
    return f"{label}: {result.seconds:.1f} s" if result.ok else f"{label}: not compiled ({result.error_type})"
