"""The process that compute-sanitizer or cuda-gdb watches: `python -m mla_var3.lab.diagnosis.watched JOB.json`.

Plans one version, calls it once, and compares the result with the oracle. Inputs are made and judged on the CPU, so
that the tool watches the version's own kernels and little else. Ends with 0 (right), 1 (wrong) or 2 (a mistake).

JOB.json: {"kernel", "problem", "tiling": record | null, "seed"}.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mla_var3.errors import EXIT_USER_ERROR, UserError


def run(job: Mapping[str, Any]) -> tuple[bool, str]:
    """(right, a sentence). Raises `UserError` where there is no GPU or the version does not take the problem."""
    import torch

    from mla_var3.lab.profiling.target import plan_of

    plan = plan_of(job, "watched")
    options = dict(getattr(plan, "input_options", {}))
    inputs = plan.prepare_inputs("cpu", seed=int(job.get("seed", 0)), **options)
    kernel = plan.plan(*(x.cuda() for x in inputs))
    found = [x.cpu() for x in kernel()]
    torch.cuda.synchronize()
    return judge(plan, found, plan.reference_fn(*inputs), options.get("dist", "flashmla"))


def judge(plan: Any, found: Sequence[Any], reference: Sequence[Any], dist: str) -> tuple[bool, str]:
    """(right, a sentence) of outputs on the CPU, by the bounds of a plan."""
    from mla_var3.check.judge import bounds_of, compare

    verdict = compare(plan.workload, found, reference, bounds_of(plan, dist))
    if verdict.ok:
        errors = [f"of {name} {error:.2e}" for name, error in verdict.to_record().items()]
        return True, f"right: error {', '.join(errors)}"
    return False, f"WRONG: {verdict.reason}"


def main(argv: Sequence[str] | None = None) -> int:
    words = list(sys.argv[1:] if argv is None else argv)
    if len(words) != 1:
        print("usage: python -m mla_var3.lab.diagnosis.watched JOB.json", file=sys.stderr)
        return EXIT_USER_ERROR
    try:
        right, said = run(json.loads(Path(words[0]).read_text(encoding="utf-8")))
    except UserError as error:
        print(f"watched: {error}", file=sys.stderr)
        return EXIT_USER_ERROR
    print(f"watched: {said}", flush=True)
    return 0 if right else 1


if __name__ == "__main__":
    raise SystemExit(main())
