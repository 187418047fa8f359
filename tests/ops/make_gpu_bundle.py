"""Compiles what the GPU tests of this folder run into a bundle, for a GPU machine that need not compile, or cannot.

    python tests/ops/make_gpu_bundle.py DIR [PART ...] [--list] [--without LANG]

Without parts, see `PARTS`: all of them. The tests find it when MLA_VAR3_BUNDLES names DIR. About 5 s of one core a
class; --list says how many there are. The dispatcher's rules and the versions' sources must be those of the machine
that runs the tests, and so must the installed languages: `--without cutile-dsl` picks as a machine without cuTile does.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[1] / "layers"))
sys.path.insert(0, str(Path(__file__).parents[1] / "kernel"))
sys.path.insert(0, str(Path(__file__).parent))

from mla_var3.catalogue import registry
from mla_var3.catalogue.registry import KernelId
from mla_var3.cli.arguments import experiment_cells
from mla_var3.device import Device
from mla_var3.dispatch import choose
from mla_var3.lab import bundle
from mla_var3.ops import fixed
from mla_var3.workload.decode import MlaProblem
from mla_var3.workload.gemm import GemmProblem
from mla_var3.workload.indexer_topk import IndexerTopkProblem
from mla_var3.workload.layer import LayerProblem
from mla_var3.workload.prefill import PrefillProblem
from mla_var3.workload.topk import TopkProblem

DEVICE = Device.get("h200")
#: (version, knobs over its default tiling, problem)
Wanted = tuple[KernelId, dict[str, Any], Any]


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("parts", nargs="*", choices=[[], *PARTS], default=[])
    parser.add_argument("--jobs", type=int, help="compiler processes; default: one a core")
    parser.add_argument("--list", action="store_true", help="compile nothing, count the classes")
    parser.add_argument("--no-checks", action="store_true", help="leave out what only checks of these problems plan")
    parser.add_argument("--without", action="append", default=[], metavar="LANG", help="pick as if it were missing")
    args = parser.parse_args(words)
    here = registry.missing
    registry.missing = lambda what: "left out" if getattr(what, "language", what) in args.without else here(what)
    groups: dict[tuple[str, str, str], bundle.BundleJob] = {}
    refused: list[tuple[str, str]] = []
    seen: set[tuple[KernelId, str, MlaProblem]] = set()
    for part in args.parts or PARTS:
        for kernel, knobs, problem in PARTS[part]():
            key = (kernel, json.dumps(knobs, sort_keys=True), problem)
            if kernel.language != bundle.LANGUAGE or key in seen:
                continue
            seen.add(key)
            for tiling in bundle._tilings(kernel.label, problem, DEVICE, [knobs], refused):
                bundle.add(groups, kernel.label, problem, tiling, DEVICE, args.folder / "objects")
    if args.no_checks:
        groups = {key: replace(job, checked=()) for key, job in groups.items() if job.points}
    for label, reason in refused:
        print(f"refused: {label}: {reason}", file=sys.stderr)
    for name, number in sorted(Counter(job.kernel for job in groups.values()).items()):
        print(f"{name}: {number} classes")
    if args.list:
        return 0
    # One pool for all: `make_bundle` takes versions times problems, and would start one for each pair of them.
    made = bundle._make(args.folder, list(groups.values()), refused, DEVICE, args.jobs, True)
    print(made.summary())
    return 1 if made.failed else 0


def picked(problems: Iterable[MlaProblem]) -> Iterator[Wanted]:
    """What `mla_decode` picks for each problem: it sees the page table's width, no lengths, no mask of one token."""
    for problem in problems:
        tokens = problem.max_pages * problem.page_size
        seen = problem.replace(t=tokens, lengths="uniform", causal=problem.causal and problem.s > 1)
        choice = choose(seen, DEVICE)
        yield choice.kernel, choice.knobs, seen


def chosen(problems: Iterable[Any]) -> Iterator[Wanted]:
    """What the dispatcher chooses for each problem."""
    for problem in problems:
        choice = choose(problem, DEVICE)
        yield choice.kernel, choice.knobs, problem


def fixed_splits(problems: Iterable[MlaProblem], tokens: int) -> Iterator[Wanted]:
    """What the fixed-split mode runs for each problem."""
    for problem in problems:
        choice = fixed.fixed_choice(problem, tokens, DEVICE)
        yield choice.kernel, choice.knobs, problem


def random_part() -> Iterator[Wanted]:
    import test_random_problems_gpu as tests

    yield from picked([d.problem for group in tests.drawn() for d in group])
    yield from picked(tests.REGIMES)


def api_part() -> Iterator[Wanted]:
    import test_flash_mla_api_gpu as tests

    yield from picked(tests.PROBLEMS)


def ops_part() -> Iterator[Wanted]:
    import test_mla_decode_gpu as tests

    apart = [problem.replace(strided_pages=True) for problem in tests.HANDED_OVER]
    yield from picked([tests.SPLIT, tests.SPLIT.replace(b=1, lengths="uniform"), *tests.FIXED])
    yield from picked([*tests.HANDED_OVER, *apart, *tests.PACKED, tests.TREE])
    yield from fixed_splits(tests.FIXED, tests.SPLIT_TOKENS)


def serving_part() -> Iterator[Wanted]:
    """What the code of docs/serving.md calls, and the steps of a serving engine."""
    import test_serving_steps_gpu as steps

    yield from picked([problem for h in steps.HEADS for problem in steps.problems(h)])
    batch = MlaProblem(b=4, h=128, t=2048, lengths=[2000, 1, 700, 0])
    yield from picked([batch, batch.replace(causal=True), *(MlaProblem(b=b, h=16, t=8192) for b in (1, 64))])
    yield from fixed_splits([batch], 1024)


def sanitizer_part() -> Iterator[Wanted]:
    """Every version on the cells of the sanitizer's experiments, and what tests/ops/sanitizer_case.py adds to them."""
    from sanitizer_case import SPLIT_TOKENS

    cells = experiment_cells("sanitizer")
    others = ("sanitizer_sparse", "sanitizer_indexer", "sanitizer_prefill")
    every = [*cells, *(cell for name in others for cell in experiment_cells(name))]
    for kernel in registry.all_kernels():
        if kernel.language == bundle.LANGUAGE:
            plan_type = registry.get_plan(kernel)
            yield from ((kernel, {}, cell) for cell in every if plan_type(cell, None, DEVICE).supported())
    yield from picked(cells)
    yield from fixed_splits([cell for cell in cells if not cell.packed], SPLIT_TOKENS)


def fixed_part() -> Iterator[Wanted]:
    """Both contenders of experiment=fixed_split, as a sweep checks and times them."""
    cells = experiment_cells("fixed_split")
    yield from picked(cells)
    yield from fixed_splits(cells, fixed.SPLIT_TOKENS)


def operators_part() -> Iterator[Wanted]:
    import test_operators_gpu as tests

    yield from picked([*tests.PROBLEMS, *tests.BATCHES])


def layer_part() -> Iterator[Wanted]:
    import test_layer_gpu as tests

    yield from chosen(tests.PROBLEMS)
    yield from picked([tests.DECODE])


def mla_layer_part() -> Iterator[Wanted]:
    """Whole layers as kernels: those of tests/kernel/test_mla_layer_gpu.py."""
    import test_mla_layer_gpu as tests

    for problem in (*tests.PROBLEMS, LayerProblem(b=8, h=128, t=4096)):
        yield KernelId.parse("cute-dsl/mla_layer"), {}, problem
        # The layer with FlashMLA, which is not here, has the same but for one knob of this kernel.
        yield KernelId.parse("cute-dsl/rope_append"), {"eager": False}, problem.rotation


def attention_part() -> Iterator[Wanted]:
    """What decode steps of `MlaAttention` in tests/layers/test_mla_attention_gpu.py call."""
    import test_mla_attention_gpu as tests
    import torch
    from ops_fakes import CpuEngine

    from mla_var3.layers import LatentCache, MlaAttention
    from mla_var3.ops import ways

    found: list[Any] = []

    class Listening(CpuEngine):
        def run(self, way: Any, problem: Any, inputs: Any, outputs: Any, schedule: Any = None, *_: Any) -> None:
            found.append(problem)
            for x in outputs:
                x.zero_()

    ways.engine = lambda: Listening()  # type: ignore[assignment]
    for config, requests, tokens in tests.DECODED:
        made = MlaAttention(config, dtype=torch.bfloat16)
        cache = LatentCache(1, requests, tokens, columns=made.columns, dtype=torch.bfloat16)
        step = cache.extend({cache.join(): 1 for _ in range(requests)})
        with torch.no_grad():
            made._by_kernels(torch.zeros(requests, config.hidden_size, dtype=torch.bfloat16), cache.pages[0], step)
    for problem in found:
        choice = choose(problem, DEVICE)
        yield choice.kernel, choice.knobs, problem


def every_tiling(version: str, problems: Iterable[Any]) -> Iterator[Wanted]:
    """A version's default and all that its tuner tries, for each problem."""
    kernel = KernelId.parse(version)
    for problem in problems:
        plan = registry.get_plan(kernel)(problem, None, DEVICE)
        yield from ((kernel, tiling.to_record(), problem) for tiling in (plan.tiling, *plan.autotune_configs()))


def gemm_part() -> Iterator[Wanted]:
    """What tests/kernel/test_absorb_gemm_gpu.py plans: all tilings, and anew for two cases of the check."""
    import test_absorb_gemm_gpu as tests

    yield from every_tiling("cute-dsl/absorb_gemm", tests.PROBLEMS)
    anew = [problem.replace(tokens=tokens) for problem in tests.PROBLEMS for tokens in (3, 1027)]
    chained = [GemmProblem(side=side, tokens=tokens) for side in ("q", "out") for tokens in tests.CHAINED]
    for problem in (*anew, *chained, *tests.OTHER_WIDTHS):
        yield tests.CUTE, {}, problem


def rope_part() -> Iterator[Wanted]:
    """What tests/kernel/test_rope_append_gpu.py plans, in all tilings, and anew for cases of the check."""
    import test_rope_append_gpu as tests

    yield from every_tiling("cute-dsl/rope_append", tests.PROBLEMS)
    few = [problem.replace(tokens=3) for problem in tests.PROBLEMS]
    many = [problem.replace(tokens=5003, h=16) for problem in tests.PROBLEMS]
    for problem in (*few, *many, *tests.IN_PLACE, tests.FAR):
        yield KernelId.parse("cute-dsl/rope_append"), {}, problem


def append_part() -> Iterator[Wanted]:
    """What tests/kernel/test_packed_append_gpu.py plans, in all tilings, and test_sparse_mla_decode_gpu.py calls."""
    import test_packed_append_gpu as tests
    import test_sparse_mla_decode_gpu as steps

    yield from every_tiling("cute-dsl/packed_append", tests.PROBLEMS)
    yield KernelId.parse("cute-dsl/packed_append"), {}, tests.FAR
    yield from chosen(steps.APPENDED)


def sparse_part() -> Iterator[Wanted]:
    """What test_sparse_mla_decode_gpu.py asks of packed caches; the `append` part has what it appends with."""
    import test_sparse_mla_decode_gpu as tests

    yield from chosen(tests.problems())


def random_sparse_part() -> Iterator[Wanted]:
    import test_random_sparse_gpu as tests

    yield from chosen(tests.problems())


def indexer_part() -> Iterator[Wanted]:
    """What tests/kernel/test_indexer_gpu.py plans, in all tilings where it does, and test_indexer_gpu.py calls."""
    import test_indexer_gpu as calls

    tests = _of_kernels("test_indexer_gpu")
    logits, both, index, at_once = (
        f"cute-dsl/{name}" for name in ("mqa_logits_v4", "indexer_topk", "index_append", "indexed_append")
    )
    plain = {
        logits: tests.LOGITS, tests.CHOOSES: [*tests.TOPK, TopkProblem(b=140, t=70000)], tests.SHORT: tests.SHORT_ROWS,
        tests.LONG: tests.LONG_ROWS, tests.CHUNKS: [*tests.LONG_ROWS, *tests.MANY_LONG_ROWS],
        at_once: tests.APPENDED,
    }  # fmt: skip
    yield from ((KernelId.parse(label), {}, problem) for label, problems in plain.items() for problem in problems)
    for label, problem in tests.EVERY_TILING:
        yield from every_tiling(label, [problem])
    yield from every_tiling(both, [*tests.CHOICES, *(IndexerTopkProblem(b=8, t=9000, topk=k) for k in (64, 2048))])
    yield from every_tiling(index, tests.KEYS)
    for label, t in tests.IN_ORDER:
        yield from every_tiling(label, [TopkProblem(b=7, t=t, topk=k) for k in (64, 512, 2048)])
    yield from chosen([*tests.CALLED, *(problem.of_latents for problem in tests.APPENDED)])
    for problem in (calls.PAGED, calls.PROMPT):
        yield from chosen([problem, problem.replace(dtype="bf16")])


def _of_kernels(name: str) -> Any:
    """A test file of tests/kernel of which this folder has a namesake."""
    spec = importlib.util.spec_from_file_location(
        f"{name}_of_kernels", Path(__file__).parents[1] / "kernel" / f"{name}.py"
    )
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def merge_part() -> Iterator[Wanted]:
    """What tests/kernel/test_merge_partials_gpu.py plans, in all tilings."""
    import test_merge_partials_gpu as tests

    yield from every_tiling("cute-dsl/merge_partials", tests.PROBLEMS)
    yield KernelId.parse("cute-dsl/merge_partials"), {}, tests.CHAINED


def scores_part() -> Iterator[Wanted]:
    """What test_scores_gpu.py plans and calls: NaN, scales of zero and below, and large logits."""
    import test_scores_gpu as tests

    for kernel, problem in tests.PLANNED:
        if registry.get_plan(kernel)(problem, None, DEVICE).feasible():
            yield kernel, {}, problem
    yield from picked(tests.DECODE)
    yield from fixed_splits(tests.DECODE[:2], tests.SPLIT_TOKENS)
    yield from chosen([*tests.PACKED, *(p for p in tests.OTHERS if p.workload == "merge")])
    yield from (
        (kernel, {}, tests.FEW) for kernel in tests.OURS if registry.get_plan(kernel).requires.accepts(tests.FEW)
    )


def versions_part() -> Iterator[Wanted]:
    """What the tests of versions 23 and 24 in tests/kernel plan: pages, widths, packed queries, splits, merges."""
    import test_dependents_gpu as dependents
    import test_merge_shares_gpu as merges
    import test_packed_gpu as packed
    import test_pages_gpu as pages
    import test_split_tokens_gpu as splits
    import test_widths_gpu as widths

    plain: list[tuple[str, MlaProblem]] = list(dependents.CASES)
    plain += [(label, MlaProblem(h=h)) for label, h in merges.CLASSES]
    plain += [(label, MlaProblem(h=h, s=s, causal=s > 1)) for label, h, s in splits.CLASSES]
    for k, p in widths.WIDTHS:
        plain += [(label, MlaProblem(h=h, s=s, k=k, p=p, causal=s > 1)) for label, h, s in widths.CLASSES]
    for cases, strided in ((pages.CASES, False), (pages.STRIDED, True)):
        for label, h, h_kv, s, page in cases:
            problem = MlaProblem(h=h, h_kv=h_kv, s=s, causal=s > 1, page=page, strided_pages=strided)
            plain.append((label, problem))
    yield from ((KernelId.parse(label), {}, problem) for label, problem in plain)
    for label, tokens, problem in packed.CASES:
        yield KernelId.parse(label), {"query_tokens": tokens}, problem


def prefill_part() -> Iterator[Wanted]:
    """What test_mla_prefill_gpu.py checks and calls. The tests' own problems come last: their cases bring no class
    that the check of all widths does not."""
    import test_mla_prefill_gpu as tests

    for kernel in tests.VERSIONS:
        if registry.missing(kernel) is not None:
            continue
        for problem in tests.CHECKED:
            if registry.get_plan(kernel)(problem, None, DEVICE).supported():
                yield kernel, {}, problem
    yield from chosen(tests.problems())


def chunks_part() -> Iterator[Wanted]:
    """What test_mla_chunk_prefill_gpu.py calls, both ways, and prompts of test_mla_attention_gpu.py."""
    import test_mla_attention_gpu as layers
    import test_mla_chunk_prefill_gpu as tests

    for h in sorted({tests.REAL.h, *(config.num_attention_heads for config in layers.CONFIGS.values())}):
        yield from chosen(PrefillProblem(b=2, h=h, causal=causal) for causal in (True, False))
        for causal in (True, False):
            yield from chosen([MlaProblem(b=2, h=h, t=1024, causal=causal, queries={"total": 64})])
        yield from chosen(GemmProblem(side=side, tokens=64, h=h) for side in ("q", "out"))


def jax_part() -> Iterator[Wanted]:
    import ops_gpu

    yield from picked(ops_gpu.JAX)


def cpp_part() -> Iterator[Wanted]:
    import ops_gpu

    yield from picked(ops_gpu.CPP)


PARTS: dict[str, Callable[[], Iterator[Wanted]]] = {
    "random": random_part,
    "api": api_part,
    "ops": ops_part,
    "serving": serving_part,
    "sanitizer": sanitizer_part,
    "scores": scores_part,
    "versions": versions_part,
    "fixed": fixed_part,
    "operators": operators_part,
    "layer": layer_part,
    "mla_layer": mla_layer_part,
    "attention": attention_part,
    "rope": rope_part,
    "append": append_part,
    "sparse": sparse_part,
    "random_sparse": random_sparse_part,
    "gemm": gemm_part,
    "indexer": indexer_part,
    "merge": merge_part,
    "prefill": prefill_part,
    "chunks": chunks_part,
    "jax": jax_part,
    "cpp": cpp_part,
}


if __name__ == "__main__":
    raise SystemExit(main())
