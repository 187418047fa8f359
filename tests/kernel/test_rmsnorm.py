"""rmsnorm in every language: what it compiles to, which tilings it takes, and that it is right on a CPU."""

# ruff: noqa: E402 - the imports below need what importorskip found
from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from planning import plan_type

from mla_var3.check.judge import check
from mla_var3.device import Device
from mla_var3.errors import UserError
from mla_var3.workload.norm import NormProblem, make_inputs

H200 = Device.get("h200")
COMPILED = ("cute-dsl/rmsnorm", "cutile-dsl/rmsnorm", "triton/rmsnorm")
PROBLEMS = [
    NormProblem(rows=4096),
    NormProblem(rows=1),
    NormProblem(rows=4096, residual=True),
    NormProblem(rows=4096, width=1536, second=512, rest=64),
    NormProblem(rows=4096, width=512, dtype="fp16"),
]


@pytest.mark.parametrize("problem", PROBLEMS, ids=lambda p: p.label)
@pytest.mark.parametrize("label", COMPILED)
def test_nothing_spills(label: str, problem: NormProblem) -> None:
    made = plan_type(label)(problem, None, H200).plan_empty().compile(None, H200)
    assert made.resources.spill_bytes == 0 and made.warnings == ()


def bytes_in_flight(problem: NormProblem, tiling: Any = None) -> int:
    """Of the rows that an SM loads at a time."""
    plan = plan_type("cute-dsl/rmsnorm")(problem, tiling, H200)
    resources = plan.plan_empty().compile(None, H200).resources
    held = plan.tiling.rows * problem.columns * problem.element_bytes * (2 if problem.residual else 1)
    return int(resources.ctas_per_sm * held)


@pytest.mark.parametrize("problem", [p for p in PROBLEMS if p.rows > 1], ids=lambda p: p.label)
def test_cute_has_enough_in_flight_for_the_memory_s_rate(problem: NormProblem) -> None:
    """4.8 TB/s times some 1.1 us of latency, over 132 SMs, is 40 KB each."""
    assert bytes_in_flight(problem) >= 40_000


@pytest.mark.parametrize(
    ("width", "rows", "tiling"),
    [(7168, 128, (1, 1)), (7168, 512, (4, 1)), (1536, 512, (2, 1)), (1536, 513, (3, 2)), (512, 512, (2, 1)),
     (512, 513, (2, 4)), (8192, 1, (1, 1)), (16384, 1, (4, 1))],
)  # fmt: skip
def test_cute_spreads_few_rows_over_many_warps(width: int, rows: int, tiling: tuple[int, int]) -> None:
    """As measured in results/h100/traces/2026-11-26-rmsnorm_tilings.txt; and what fits in a CTA, of wider rows."""
    problem = NormProblem(rows=rows, width=width)
    found = plan_type("cute-dsl/rmsnorm")(problem, None, H200).tiling
    assert (found.vectors, found.rows) == tiling and found.validate(problem, H200)


@pytest.mark.parametrize(("problem", "vectors"), [(PROBLEMS[0], 4), (PROBLEMS[2], 8), (PROBLEMS[3], 2)])
def test_cute_loads_a_row_before_it_uses_it(problem: NormProblem, vectors: int, tmp_path: Any) -> None:
    """Every load of a lane stands in front of the first shuffle: vectors of 16 bytes past L1, and those of the weights,
    which do not wait for the kernel before."""
    made = plan_type("cute-dsl/rmsnorm")(problem, None, H200).plan_empty().compile(tmp_path, H200, ("sass",))
    text = made.artefacts["sass"].read_text()
    before, wait = text.index("SHFL"), text.index("ACQBULK")
    loads = [i for i in range(len(text)) if text.startswith("LDG.E.NA.128", i)]
    assert len(loads) == vectors and all(wait < i < before for i in loads)
    weights = [i for i in range(len(text)) if text.startswith("LDG.E.128", i)]
    assert weights and all(i < wait for i in weights)
    assert text.index("PREEXIT") < wait


def test_cute_takes_persistent_grids_and_odd_widths() -> None:
    from mla_var3.kernel.cute_python.norm.rmsnorm.rmsnorm.rmsnorm import RmsNormPlan, RmsNormTiling

    odd = NormProblem(rows=4096, width=520, second=264)
    for problem, tiling in (
        (PROBLEMS[2], RmsNormTiling(4, 1, 1)),
        (PROBLEMS[3], RmsNormTiling(2, 2, 2)),
        (odd, RmsNormTiling(2, 2, 0)),
        (odd, RmsNormTiling(2, 2, 2)),
    ):
        made = RmsNormPlan(problem, tiling, H200).plan_empty().compile(None, H200)
        assert made.resources.spill_bytes == 0


def test_refusals_say_why() -> None:
    from mla_var3.kernel.cute_python.norm.rmsnorm.rmsnorm.rmsnorm import RmsNormPlan, RmsNormTiling

    assert "multiple" in RmsNormPlan.requires.accepts(NormProblem(width=100)).reason
    assert "CTA" in RmsNormPlan.requires.accepts(NormProblem(width=1 << 17)).reason
    assert "threads" in RmsNormTiling(1, 2).validate(NormProblem(), H200).reason
    assert "ctas_per_sm" in RmsNormTiling(4, 1, 99).validate(NormProblem(), H200).reason
    inputs = make_inputs(NormProblem(rows=2, rest=8))
    shifted = torch.empty(2 * 7176 + 1, dtype=torch.bfloat16)[1:].view(2, 7176)[:, :7168]
    with pytest.raises(UserError, match="multiples of 16"):
        RmsNormPlan(NormProblem(rows=2, rest=8), None, H200).plan(shifted, *inputs[1:])


@pytest.mark.parametrize("label", ["cute-dsl/rmsnorm", "cutile-dsl/rmsnorm"])
@pytest.mark.parametrize("problem", PROBLEMS, ids=lambda p: p.label)
def test_every_tiling_that_is_tuned_is_feasible(label: str, problem: NormProblem) -> None:
    configs = plan_type(label)(problem, None, H200).autotune_configs()
    assert len(configs) >= 3 and all(t.validate(problem, H200) for t in configs)


@pytest.mark.parametrize("problem", [p.replace(rows=3) for p in PROBLEMS[:1] + PROBLEMS[2:]], ids=lambda p: p.label)
@pytest.mark.parametrize("label", ["torch/rmsnorm", "cutile-dsl/rmsnorm"])
def test_right_on_a_cpu(label: str, problem: NormProblem) -> None:
    report = check(plan_type(label), problem, device="cpu", seeds=[5])
    assert report.ok, report.reason
    assert len(report.cases) == 10
