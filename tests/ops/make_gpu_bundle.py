"""Compiles what the GPU tests of this folder run into a bundle, for a GPU machine that need not compile, or cannot.

    python tests/ops/make_gpu_bundle.py DIR [random] [api] [ops] [sanitizer]

Without names: all four. The tests find it when MLA_VAR3_BUNDLES names DIR. About 5 s of one core a class: 49 classes of
random problems, 36 of FlashMLA's interface, 12 of the rest, and every CuTe version on the sanitizer's cells.
"""

from __future__ import annotations

import argparse
import sys
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from mla_var3.device import Device
from mla_var3.dispatch import pick
from mla_var3.kernel import registry
from mla_var3.ops import fixed
from mla_var3.problem import MlaProblem
from mla_var3.toolchain.bundle import make_bundle

PARTS = ("random", "api", "ops", "sanitizer")
DEVICE = Device.get("h200")


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("parts", nargs="*", choices=[[], *PARTS], default=[])
    parser.add_argument("--jobs", type=int, help="compiler processes; default: one a core")
    args = parser.parse_args(words)
    for part in args.parts or PARTS:
        bundle(part, args.folder, args.jobs)
    return 0


def bundle(part: str, folder: Path, jobs: int | None) -> None:
    """Adds what one group of tests needs."""
    if part == "random":
        import test_random_problems_gpu as random_problems

        picked([d.problem for group in random_problems.drawn() for d in group], folder, jobs)
        picked(random_problems.REGIMES, folder, jobs)
    elif part == "api":
        import test_flash_mla_api_gpu as api

        picked([problem for each in api.CLASSES for problem in api.batches(*each)], folder, jobs)
    elif part == "ops":
        import test_mla_decode_gpu as ops

        picked([ops.SPLIT, ops.SPLIT.replace(b=1, lengths="uniform"), *ops.FIXED], folder, jobs)
        whole(ops.FIXED, ops.PART, folder, jobs)
    else:
        from sanitizer_case import PART

        from mla_var3.verbs import experiment_cells

        cells = experiment_cells("sanitizer")
        versions = [k for k in registry.all_kernels() if k.language == "cute-dsl"]
        print(make_bundle(folder, versions, cells, "default", DEVICE, jobs).summary())
        whole(cells, PART, folder, jobs)


def picked(problems: Iterable[MlaProblem], folder: Path, jobs: int | None) -> None:
    """The version that `mla_decode` picks for each problem."""
    groups = defaultdict(list)
    for problem in problems:
        groups[pick(problem, DEVICE).kernel].append(problem)
    for kernel, mine in groups.items():
        print(make_bundle(folder, [kernel], mine, "default", DEVICE, jobs).summary())


def whole(problems: Iterable[MlaProblem], part: int, folder: Path, jobs: int | None) -> None:
    """The versions that the fixed-split mode runs for each problem."""
    for problem in problems:
        plan = fixed.FixedSplitPlan(problem, fixed.FixedSplitTiling(part), DEVICE)
        inner = fixed.inner_problem(problem, problem.b, part)
        for splits in (fixed.WHOLE, fixed.HALVES):
            knobs = [{"num_splits": splits}]
            print(make_bundle(folder, [plan.inner_kernel(splits)], [inner], knobs, DEVICE, jobs).summary())


if __name__ == "__main__":
    raise SystemExit(main())
