"""Running kernels on the CPU at small sizes: what can be checked without a GPU.

Each language runs in a process of its own (Triton picks its interpreter when a kernel is decorated, so the choice
belongs to a process), and a crash or a hang there is that language's record. Nothing is timed.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mla_var3 import paths, workload
from mla_var3.catalogue.registry import LANGUAGES, Interpreter, KernelId, cannot_run_on_cpu
from mla_var3.cutile_cpu.errors import KernelFault
from mla_var3.errors import Unsupported, UserError
from mla_var3.toolchain import mistakes
from mla_var3.workload import Problem, problem_from_record

TIMEOUT_S = 150.0


def interpreter(language: str) -> Interpreter:
    """What runs a language's kernels on a CPU; a `UserError` where nothing does."""
    found = LANGUAGES[language].interpreter
    if found is None:
        raise UserError(f"{LANGUAGES[language].gpu_only}.")
    return found


def use_interpreter(language: str, label: str) -> None:
    """Makes this process one that runs a language's kernels on a CPU, before anything imports the language.

    label: the version that asks. Raises `UserError` where the language has no interpreter, or is loaded for a GPU.
    """
    why = cannot_run_on_cpu(language)
    if why:
        raise UserError(f"{label} does not run here: {why}; use a machine with a GPU.")
    if language == "triton" and "triton" in sys.modules and os.environ.get("TRITON_INTERPRET") != "1":
        raise UserError("Triton is loaded for a GPU in this process: start with TRITON_INTERPRET=1 in the environment.")
    os.environ.update(interpreter(language).env)


def small(problem: Problem) -> Any:
    """A problem of the cell's kind that a CPU runs in seconds."""
    return workload.get(problem.workload).small(problem)


@dataclass(frozen=True)
class CpuResult:
    """Outcome of one run: status passed, incorrect, infeasible, skipped or failed."""

    kernel: KernelId
    problem: Problem
    status: str
    reason: str
    error: dict[str, float] | None
    tiling: dict[str, Any] | None
    seconds: float


def run_many(
    work: Sequence[tuple[KernelId, Problem]],
    asked: Mapping[str, Any] | None = None,
    *,
    timeout_s: float = TIMEOUT_S,
    tell: Callable[[str], None] = lambda line: None,
) -> Iterator[CpuResult]:
    """Runs each kernel on each problem, results as they come, in the order of `work` within a language."""
    for language in dict.fromkeys(kernel.language for kernel, _ in work):
        left = [(k, p) for k, p in work if k.language == language]
        while left:
            done = 0
            for result in _run_process(language, left, asked or {}, timeout_s, tell):
                done += 1
                yield result
            # The process ended early: what it was at is its last result, the rest gets a fresh process.
            left = left[done:] if done else []


def _run_process(
    language: str,
    work: Sequence[tuple[KernelId, Problem]],
    asked: Mapping[str, Any],
    timeout_s: float,
    tell: Callable[[str], None],
) -> Iterator[CpuResult]:
    env = {"OMP_NUM_THREADS": str(len(os.sched_getaffinity(0))), **os.environ, **interpreter(language).env}
    env["PYTHONPATH"] = paths.python_path()
    jobs = [{"kernel": k.to_record(), "problem": p.to_record(), "asked": dict(asked)} for k, p in work]
    tell(f"running {len(work)} small problems with {interpreter(language).name}")
    process = subprocess.Popen(
        [sys.executable, "-m", "mla_var3.lab.sweep.cpu"],
        env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stdin is not None and process.stdout is not None
    late = threading.Event()

    def stop() -> None:
        late.set()
        process.kill()

    timer = threading.Timer(timeout_s, stop)
    errors: list[str] = []
    reader = threading.Thread(
        target=lambda: errors.append(process.stderr.read() if process.stderr else ""), daemon=True
    )
    timer.start()
    reader.start()
    done = 0
    try:
        process.stdin.write(json.dumps(jobs))
        process.stdin.close()
        for line in process.stdout:
            if not line.startswith("{"):
                continue
            kernel, problem = work[done]
            done += 1
            yield CpuResult(kernel, problem, **json.loads(line))
        code = process.wait()
        if done < len(work):
            reader.join(5)
            said = (errors[0].strip().splitlines() if errors else [])[-1:] or ["nothing was printed"]
            why = f"took longer than {timeout_s:g} s" if late.is_set() else f"its process ended with {code}: {said[0]}"
            yield CpuResult(*work[done], "failed", why, None, None, 0.0)
    except BrokenPipeError:
        yield CpuResult(*work[done], "failed", "its process ended before it began", None, None, 0.0)
    finally:
        timer.cancel()
        if process.poll() is None:
            process.kill()
        process.wait()


# ---------------------------------------------------------------- in the process
def run_one(kernel: KernelId, problem: Problem, asked: Mapping[str, Any]) -> dict[str, Any]:
    """Checks one kernel on the CPU, on the first two cases of its workload's quick check, and returns the fields of a
    `CpuResult` that are not known outside."""
    import time

    from mla_var3.catalogue.registry import get_plan
    from mla_var3.check.judge import check
    from mla_var3.lab.knobs import knobs, own_knobs

    began = time.perf_counter()
    outcome: dict[str, Any] = {"status": "failed", "reason": "", "error": None, "tiling": None}
    try:
        plan_type = get_plan(kernel)
        accepted = plan_type.requires.accepts(problem)
        if not accepted:
            outcome |= {"status": "skipped", "reason": accepted.reason}
        else:
            plan = plan_type(problem, None, None)
            tiling = knobs(plan.tiling, own_knobs(plan_type, asked))
            outcome["tiling"] = tiling.to_record()
            feasible = tiling.validate(problem, None)
            if not feasible:
                outcome |= {"status": "infeasible", "reason": feasible.reason}
            else:
                cases = workload.get(problem.workload).quick[:2]
                report = check(plan_type, problem, tiling, "cpu", cases=cases)
                outcome |= {"status": "passed" if report.ok else "incorrect", "reason": report.reason}
                outcome["error"] = {name: float(value) for name, value in report.error.items()}
    except Unsupported as error:
        outcome |= {"status": "skipped", "reason": str(error)}
    except UserError as error:
        # What an interpreted kernel did wrong has no meaning on a GPU either.
        status = "incorrect" if isinstance(error.__cause__, KernelFault) else "infeasible"
        outcome |= {"status": status, "reason": str(error)}
    except Exception as error:
        outcome |= {"status": "failed", "reason": mistakes.sentence(error)}
    outcome["seconds"] = round(time.perf_counter() - began, 3)
    return outcome


def main() -> int:
    """Reads jobs from standard input and prints one line of JSON a job."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what kernels print does not mix with the results
    for job in json.loads(sys.stdin.read()):
        kernel = KernelId(**job["kernel"])
        outcome = run_one(kernel, problem_from_record(job["problem"]), job["asked"])
        print(json.dumps(outcome), file=out, flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
