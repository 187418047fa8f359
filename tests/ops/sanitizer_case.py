"""Small calls of kernel versions, for compute-sanitizer: a few seconds under each of its tools.

    compute-sanitizer --tool memcheck  python3 tests/ops/sanitizer_case.py 'cute-dsl/*'
    compute-sanitizer --tool racecheck python3 tests/ops/sanitizer_case.py cute-dsl/flash_mla_v23
    compute-sanitizer --tool synccheck python3 tests/ops/sanitizer_case.py --bundle DIR 'cute-dsl/*'
    compute-sanitizer python3 tests/ops/sanitizer_case.py --experiment sanitizer_sparse cute-dsl/sparse_mla_v2
    compute-sanitizer python3 tests/ops/sanitizer_case.py --experiment sanitizer_prefill 'cute-dsl/flash_attention*'
    compute-sanitizer python3 tests/ops/sanitizer_case.py --experiment sanitizer_portable --tiling tile_n=16 \
        cute-dsl/flash_mla_mma_v3

The cells are those of experiment=sanitizer, or of another one, of which a bundle can be made: `mla-var3 compile
'cute-dsl/*' --device h200 --experiment sanitizer --bundle DIR`. Inputs are made and results judged on the
CPU, so that the tool watches little else than the versions' own kernels. Where calls may share a schedule, one that
makes it and one that reads it are watched too, and of a prefix that a pipeline can cut, a call of one piece and one of
three. --fixed adds the fixed-split mode and --ops what `mla_decode` picks.
Ends with 1 when a result is wrong; for memcheck set PYTORCH_NO_CUDA_MEMORY_CACHING=1, so that every tensor is an
allocation of its own.
"""

from __future__ import annotations

import argparse
import functools
import math
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

SPLIT_TOKENS = 128  # of the fixed-split mode


def ways(kernel: Any) -> Iterator[tuple[str, Sequence[Any]]]:
    """(way, (out, lse)) of a call by itself and, where calls may share a schedule, of one that makes it and the next
    one, which reads it."""
    from mla_var3.check.judge import untouched

    for x in kernel.output_tensors:
        x.fill_(untouched(x))
    yield "", kernel()
    sharing = kernel.sharing()
    if sharing is not kernel:
        last, made = (getattr(x, "stages", (x,))[-1] for x in (kernel, sharing))
        if made is not last:  # else stages behind the one that makes a schedule have not run
            yield " making a schedule", kernel.output_tensors
        yield " reading a schedule", sharing()


def in_pieces(plan_type: Any, problem: Any, device: Any, given: Sequence[Any]) -> Iterator[tuple[str, Sequence[Any]]]:
    """What `ways` yields of a pipeline that cuts the prefix, where keys and values of a third of it have room."""
    from mla_var3.kernel import chunks

    whole = chunks.PIECE_BYTES
    rows = problem.prefix_tokens + problem.query_tokens
    chunks.PIECE_BYTES = -(-rows // 3) * (2 * problem.d + problem.p) * problem.h * problem.element_bytes
    try:
        yield from ways(plan_type(problem, None, device).plan(*given))
    finally:
        chunks.PIECE_BYTES = whole


def cases(
    patterns: Sequence[str], fixed: bool, ops: bool, experiment: str, asked: dict[str, Any]
) -> Iterator[tuple[str, Any, Any]]:
    """(name, problem, function of GPU inputs that returns what `ways` does). asked: knobs over the default tiling."""
    from ops_gpu import decode

    from mla_var3.catalogue import registry
    from mla_var3.cli.arguments import experiment_cells, tiling_of
    from mla_var3.device import Device
    from mla_var3.lab.sweep.plan import select_kernels
    from mla_var3.workload.decode import MlaProblem

    device = Device.detect()
    if device is None:
        sys.exit("there is no GPU here: compute-sanitizer watches kernels run.")
    for problem in experiment_cells(experiment):
        for kernel in select_kernels(patterns) if patterns else []:
            reason = registry.missing(kernel)
            if reason:
                print(f"{kernel.label}: skipped: {reason}")
                continue
            of = registry.get_plan(kernel)
            if of.workload.name != problem.workload:
                continue  # the experiment has cells of several workloads
            plan = of(problem, tiling_of(of, problem, device, asked) if asked else None, device)
            verdict = plan.supported() and plan.feasible()
            if not verdict:
                print(f"{kernel.label} {problem.label}: skipped: {verdict.reason}")
                continue
            yield kernel.label, problem, lambda given, plan=plan: ways(plan.plan(*given))
            if kernel.design == "chunk_decompress":
                cut = functools.partial(in_pieces, registry.get_plan(kernel), problem, device)
                yield f"{kernel.label} in pieces", problem, cut
        dense = isinstance(problem, MlaProblem)
        calls = [("mla_decode", {})] if ops and dense else []
        if fixed and dense and not problem.packed:
            calls.append(("fixed_split", {"fixed_split": SPLIT_TOKENS}))
        for name, options in calls:
            yield name, problem, lambda given, pd=problem, options=options: [("", decode(pd, given, **options))]


def main(words: Sequence[str] | None = None) -> int:
    """Runs every case once, prints a line for each, and returns 1 when one is wrong."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("kernels", nargs="*", help="language/design[_vN]; * and ? are wildcards")
    parser.add_argument("--experiment", default="sanitizer", help="whose cells (sanitizer)")
    parser.add_argument("--tiling", metavar="K=V,...", default="", help="knobs that differ from the default tiling")
    parser.add_argument("--bundle", type=Path, help="compiled kernels, where the compiler is missing")
    parser.add_argument("--fixed", action="store_true", help="also the fixed-split mode")
    parser.add_argument("--ops", action="store_true", help="also what mla_decode picks")
    args = parser.parse_args(words)
    if args.bundle is not None:
        from mla_var3.toolchain.bundle import open_bundle

        open_bundle(args.bundle)
    import torch

    from mla_var3 import workload
    from mla_var3.check.judge import compare
    from mla_var3.cli.arguments import tiling_fields
    from mla_var3.workload import decode

    wrong = count = 0
    asked = tiling_fields(args.tiling)
    for name, problem, run in cases(args.kernels, args.fixed, args.ops, args.experiment, asked):
        of = workload.get(problem.workload)
        bounds = decode.DOMINATED if of is decode.WORKLOAD else of.bounds("flashmla")
        # Prompts are drawn from N(0, 1) unless told otherwise, which is not what the bounds are for.
        options = {"dist": "flashmla"} if problem.workload in ("prefill", "chunked_prefill") else {}
        given = of.make_inputs(problem, "cpu", seed=5, **options)
        reference = of.reference(problem, *given)
        for way, found in run(tuple(x.cuda() for x in given)):
            torch.cuda.synchronize()
            verdict = compare(of, [x.cpu() for x in found], reference, bounds)
            print(f"{name}{way} {problem.label}: {'right' if verdict.ok else verdict.reason}", flush=True)
            wrong += not verdict.ok
            count += 1
            for x in found:
                x.fill_(math.nan if x.is_floating_point() else -1)
    print(f"{count} calls, {wrong} wrong")
    return 1 if wrong or not count else 0


if __name__ == "__main__":
    sys.exit(main())
