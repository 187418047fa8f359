"""A workload is one file: with nothing else changed it is found, checked, recorded, swept and shown."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from mla_var3 import cli, workload  # noqa: E402
from mla_var3.check.judge import check  # noqa: E402
from mla_var3.device import Requirement  # noqa: E402
from mla_var3.lab import naming  # noqa: E402
from mla_var3.lab.report.gather import arrange, command  # noqa: E402
from mla_var3.lab.sweep import config, plan  # noqa: E402
from mla_var3.record import Record  # noqa: E402
from torch_plan import TorchPlan  # noqa: E402

#: Root-mean-square norm of rows: no attention, no requests, no cache.
NORM = """
from dataclasses import dataclass
from typing import ClassVar
import torch
from mla_var3.workload import Bound, Case, Cost, Output, Problem, Workload, check_integer

@dataclass(frozen=True)
class NormProblem(Problem):
    workload: ClassVar[str] = "toynorm"
    rows: int = 4
    width: int = 64
    dtype: str = "bf16"

    def __post_init__(self):
        check_integer("rows", self.rows, 1)

    label = property(lambda self: f"norm_r{self.rows}_w{self.width}")

    def problem_class(self):
        return self.replace(rows=1)

    def key(self):
        return f"norm_w{self.width}_{self.dtype}"

    def cost(self):
        return Cost(3 * self.rows * self.width, 2 * self.rows * self.width * self.element_bytes)

    def input_bytes(self):
        return self.rows * self.width * self.element_bytes

    output_bytes = input_bytes

def make_inputs(problem, device="cpu", *, seed=0, dist="normal", **_):
    generator = torch.Generator(device).manual_seed(seed)
    x = torch.randn((problem.rows, problem.width), generator=generator, device=device)
    return (x.to(problem.torch_dtype),)

def reference(problem, x):
    x = x.double()
    return (x * torch.rsqrt(x.square().mean(-1, keepdim=True)),)

def cases(problem, on_gpu):
    yield Case("own", problem, "normal", planned=True)
    yield Case("one_row", problem.replace(rows=1), "normal")

def rebound(problem, x):
    return problem.replace(rows=x.shape[0])

WORKLOAD = Workload(
    name="toynorm", problem=NormProblem, outputs=(Output("out", ("row", "column")),), make_inputs=make_inputs,
    reference=reference, cases=cases, case_names={"own": "", "one_row": ""}, quick=("own",),
    bounds=lambda dist: {"out": Bound(abs=1e-2, rel=1e-2, cos=1e-5, row_cos=1e-5)}, rebound=rebound,
    small=lambda problem: problem.replace(rows=2), as_bound=lambda problem: problem, sample=lambda small, given: {},
)
"""


@pytest.fixture
def norm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[workload.Workload]:
    (tmp_path / "toynorm.py").write_text(NORM)
    monkeypatch.setattr(workload, "__path__", [*workload.__path__, str(tmp_path)])
    workload.names.cache_clear()
    workload.get.cache_clear()
    yield workload.get("toynorm")
    workload.names.cache_clear()
    workload.get.cache_clear()


def plan_of(norm: workload.Workload, scale: float = 1.0) -> type[TorchPlan]:
    class NormPlan(TorchPlan):
        workload = norm
        requires = Requirement(archs=())

        def plan(self, *inputs: Any) -> Any:
            def run(x: Any) -> tuple[Any]:
                y = x.float()
                return ((scale * y * torch.rsqrt(y.square().mean(-1, keepdim=True))).to(x.dtype),)

            return self.kernel(run, inputs, (torch.empty_like(inputs[0]),))

    return NormPlan


def test_one_judge_checks_it(norm: workload.Workload) -> None:
    problem = norm.problem(rows=5)
    report = check(plan_of(norm), problem, device="cpu")
    assert report.ok, report.reason
    assert [c.name for c in report.cases] == ["own", "one_row"] and 0 < report.error["out"] < 1e-2
    wrong = check(plan_of(norm, scale=1.02), problem, device="cpu", quick=True)
    assert not wrong.ok and "at (row, column) =" in wrong.reason


def test_a_plan_of_it_takes_no_problem_of_another_workload(norm: workload.Workload) -> None:
    refused = plan_of(norm)(workload.get("decode").problem()).supported()
    assert refused.reason == "the kernel computes toynorm; the problem is one of decode"


def test_records_sweeps_and_the_report_know_it(norm: workload.Workload) -> None:
    problem = norm.problem(rows=7, width=128)
    stats = {"median": 2.0, "p10": 2.0, "p90": 2.0, "n": 5}
    record = Record(
        id="0" * 12, at="2026-01-01T00:00:00Z", experiment="norm", status="passed", problem=problem.to_record(),
        kernel={"language": "triton", "layer": "norm", "design": "rmsnorm"}, device="h200", error={"out": 1e-3},
        time_us={"burst": stats, "sustained": stats}, source={"hash": "0"}, requested="default",
    )  # fmt: skip
    again = Record.model_validate_json(record.to_json())
    assert workload.problem_from_record(again.problem) == problem
    (point,) = arrange([again]).points
    assert naming.words(problem) == "rows = 7, width = 128, dtype = bf16" and naming.phase(problem) == "toynorm"
    assert point.cell == "norm_r7_w128" and point.work() == (3 * 7 * 128, 4 * 7 * 128)
    words = command(again, problem).split()
    parsed = cli.parser_of("bench").parse_args(words[2:])
    from mla_var3.cli.arguments import problem_of

    assert problem_of(parsed, norm) == problem
    asked = config.compose(["experiment.workload=toynorm", "experiment.cells=[{rows: 7}]", "problem.width=128"])
    assert plan.expand_cells(asked) == [problem]
