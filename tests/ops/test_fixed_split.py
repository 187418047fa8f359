"""The fixed-split mode without a GPU: its planning, and, in Triton's interpreter, its results and their bits."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from mla_var3.device import Device
from mla_var3.errors import Unsupported
from mla_var3.kernel import registry
from mla_var3.ops import fixed
from mla_var3.ops.fixed import HALVES, WHOLE, FixedSplitPlan, FixedSplitTiling, inner_choice, inner_problem, runs_of
from mla_var3.workload.decode import MlaProblem

H200 = Device.get("h200")


@pytest.mark.parametrize(("tokens", "runs"), [(0, 1), (64, 1), (8192, 1), (8193, 2), (40000, 5)])
def test_a_run_is_two_parts(tokens: int, runs: int) -> None:
    assert runs_of(tokens, 4096) == runs


@pytest.mark.parametrize("h", [8, 16, 128])
def test_the_version_follows_from_the_class_and_the_size_of_a_part_alone(h: int) -> None:
    plans = [
        FixedSplitPlan(MlaProblem(b=b, h=h, t=t), FixedSplitTiling(2048), H200)
        for b, t in ((1, 64), (2, 131072), (256, 700), (64, 8192))
    ]
    for splits in (WHOLE, HALVES):
        assert len({plan.inner_kernel(splits) for plan in plans}) == 1


def test_only_versions_that_cut_by_the_number_that_they_are_told_are_taken() -> None:
    problem = inner_problem(MlaProblem(h=16), 132, 4096)
    for kernel in registry.all_kernels():
        if registry.missing(kernel) or kernel.language in ("torch", "peer"):
            continue
        plan_type = registry.get_plan(kernel)
        plan = plan_type(problem, None, H200)
        if not plan.supported():
            continue
        whole, halves = fixed.leaves_whole(plan_type, plan), fixed.leaves_halves(plan_type, plan)
        cuts = "num_splits" in plan.tiling.to_record()
        # mla_var6_plus has the knob too, and a second stage whatever it says.
        assert bool(whole) == (cuts and kernel.design == "flash_mla"), (kernel.label, whole.reason)
        assert whole or not halves
        if halves:
            stages = fixed.with_splits(plan_type, problem, H200, HALVES).plan_empty().stages
            assert len(stages) == 2, kernel.label


def test_halves_are_read_only_in_the_form_that_the_join_knows() -> None:
    """A version with partials of another type or layout would be merged into nonsense."""
    torch = pytest.importorskip("torch")
    pytest.importorskip("cutlass", reason="nvidia-cutlass-dsl is not installed")
    problem = inner_problem(MlaProblem(h=64, s=2, causal=True), 132, 4096)
    plan = registry.get_plan(registry.KernelId.parse("cute-dsl/flash_mla"))(problem, None, H200)
    assert fixed.leaves_halves(type(plan), plan)
    out, lse = plan.partials(torch.empty(4, 1, 64, 576, device="meta", dtype=torch.bfloat16), 2)
    assert (out.dtype, lse.dtype) == (torch.float32, torch.float32)
    assert (tuple(out.shape), tuple(lse.shape)) == ((2, 4, 1, 64, 512), (2, 4, 1, 64))

    class Rounded(type(plan)):  # type: ignore[misc]
        def partials(self, q, splits):
            out, lse = super().partials(q, splits)
            return out.half(), lse

    verdict = fixed.leaves_halves(Rounded, Rounded(problem, None, H200))
    assert not verdict and "of a form of its own (float16" in verdict.reason
    own = registry.get_plan(registry.KernelId.parse("cute-dsl/flash_mla_v21"))(problem, None, H200)
    assert "its partial results are its own matter" in fixed.leaves_halves(type(own), own).reason


def test_a_version_with_room_for_partial_rows_is_refused() -> None:
    torch = pytest.importorskip("torch")
    from mla_var3.errors import UserError
    from mla_var3.runtime.torch_kernel import TorchKernel

    def kernel(size: int) -> TorchKernel:
        return TorchKernel(lambda: (), name="some", workspace_tensors=(torch.zeros(size), torch.zeros(9000).int()))

    fixed._refuse_partials(kernel(4), 512)
    with pytest.raises(UserError, match="keeps partial results although num_splits = 1"):
        fixed._refuse_partials(kernel(512), 512)


def test_tokens_become_requests_only_under_a_mask() -> None:
    masked, plain = MlaProblem(b=2, s=3, causal=True), MlaProblem(b=2, s=3)
    assert (inner_problem(masked, 6, 64).s, inner_problem(masked, 6, 64).causal) == (1, False)
    assert (inner_problem(plain, 2, 64).s, inner_problem(plain, 2, 64).causal) == (3, False)
    assert not fixed.by_token(MlaProblem(s=1, causal=True))


@pytest.mark.parametrize(
    ("tokens", "problem", "reason"),
    [
        (0, MlaProblem(), "split_tokens = 0 is not a multiple of the page of 64"),
        (100, MlaProblem(), "split_tokens = 100 is not a multiple of the page of 64"),
        (64, MlaProblem(b=512, t=131072), "524,288 runs of 128 tokens are over the 65,535 of one launch"),
    ],
)
def test_sizes_that_do_not_fit_are_infeasible(tokens: int, problem: MlaProblem, reason: str) -> None:
    verdict = FixedSplitPlan(problem, FixedSplitTiling(tokens), H200).feasible()
    assert not verdict and reason in verdict.reason


def test_the_default_size_is_a_multiple_of_the_page() -> None:
    assert FixedSplitPlan(MlaProblem(), None, H200).tiling == FixedSplitTiling(4096)
    assert FixedSplitPlan(MlaProblem(page=192), None, H200).tiling == FixedSplitTiling(4224)


def test_a_device_without_a_version_is_unsupported(monkeypatch: pytest.MonkeyPatch) -> None:
    only = tuple(k for k in registry.all_kernels() if k.language == "cute-dsl")
    monkeypatch.setattr(registry, "all_kernels", lambda: only)
    inner_choice.cache_clear()
    plan = FixedSplitPlan(MlaProblem(h=3), None, Device.get("a100"))
    with pytest.raises(Unsupported):
        plan.inner_kernel()
    assert not plan.supported()


@pytest.mark.slow
def test_a_request_has_the_same_bits_alone_and_in_a_batch() -> None:
    """Runs in another process: Triton decides when it is imported whether it interprets."""
    pytest.importorskip("triton")
    case = Path(__file__).with_name("fixed_split_case.py")
    env = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(Path(fixed.__file__).parents[2])}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(case)], env=env, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.strip() == "same bits"


@pytest.mark.parametrize("tokens", [1, 2])
def test_the_small_kernels_compile_for_a_gpu(tokens: int) -> None:
    """What the interpreter lets pass (types of loop variables, branches) need not compile."""
    tl = pytest.importorskip("triton.language")
    from mla_var3.ops.fixed_kernels import join, spread
    from mla_var3.toolchain.triton_ import compile_triton

    shared = {"TOKENS": tokens, "SHORT": 4096 if tokens == 1 else -1}
    whole = {"width": "i32", "requests": "i32", "run_pages": "i32"}
    ints = dict.fromkeys(("Table", "Lens", "RunTable", "RunLens", "ShortLens"), "*i32")
    order = ("Q", "Table", "Lens", "RunQ", "RunTable", "RunLens", "ShortLens")
    signature = {name: ints.get(name, "*bf16") for name in order} | whole
    sizes = {"ROW": 128 * 576, "PAGE": 64, "BLOCK": 4096, "PAGES": 64}
    made = compile_triton(spread, signature, {**sizes, **shared}, device=H200)
    assert made.resources.spill_bytes == 0
    signature = {"PartOut": "*fp32", "PartLse": "*fp32", "Lens": "*i32", "Out": "*bf16", "Lse": "*fp32"}
    signature |= {"runs": "i32", "requests": "i32"}
    sizes = {"S": 2, "H": 128, "GROUP": 64, "K": 512, "COLUMNS": 512, "DTYPE": tl.bfloat16, "INTERPRET": False}
    made = compile_triton(join, signature, {**sizes, **shared}, device=H200)
    assert made.resources.spill_bytes == 0
