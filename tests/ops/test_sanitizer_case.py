"""The script that runs under compute-sanitizer, without a GPU: it judges results of each workload it has cells of."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import sanitizer_case
import torch

from mla_var3 import workload
from mla_var3.check.judge import UNTOUCHED
from mla_var3.cli.arguments import experiment_cells

EXPERIMENTS = (
    "sanitizer",
    "sanitizer_sparse",
    "sanitizer_indexer",
    "sanitizer_portable",
    "sanitizer_prefill",
    "sanitizer_race",
)
#: The first cell of each workload.
CELLS = {pd.workload: pd for name in EXPERIMENTS for pd in reversed(experiment_cells(name))}


def right(problem: Any, given: tuple[torch.Tensor, ...]) -> list[torch.Tensor]:
    """What a version without a fault would leave."""
    of = workload.get(problem.workload)
    return [
        (x.nan_to_num(UNTOUCHED) if output.partial else x).to(getattr(torch, output.dtype or "float32"))
        for output, x in zip(of.outputs, of.reference(problem, *given), strict=True)
    ]


def watch(monkeypatch: pytest.MonkeyPatch, problem: Any, fault: bool) -> int:
    """What the script returns on a machine whose one version computes this problem."""

    def run(given: tuple[torch.Tensor, ...]) -> list[tuple[str, list[torch.Tensor]]]:
        found = right(problem, given)
        if fault:
            found[0].flatten()[0] += 1000
        return [("", found)]

    monkeypatch.setattr(sanitizer_case, "cases", lambda *options: [("a version", problem, run)])
    monkeypatch.setattr(torch.Tensor, "cuda", lambda self: self)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    return sanitizer_case.main(["a version"])


def test_it_has_cells_of_decode_of_the_indexer_and_of_prompts() -> None:
    assert {"decode", "sparse_decode", "indexer_logits", "prefill", "chunked_prefill"} <= set(CELLS)


@pytest.mark.parametrize("name", sorted(CELLS))
def test_it_tells_right_results_from_wrong_ones(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert watch(monkeypatch, CELLS[name], fault=False) == 0
    assert f"a version {CELLS[name].label}: right" in capsys.readouterr().out
    assert watch(monkeypatch, CELLS[name], fault=True) == 1


@pytest.mark.parametrize("last", [True, False])
def test_of_a_pipeline_results_are_judged_once_its_last_stage_has_run(last: bool) -> None:
    """A pipeline makes the schedule that calls share in the stage that reads it, and runs no other stage then."""
    stages = [SimpleNamespace(name="product"), SimpleNamespace(name="attention")]
    shared = [*stages[:1], SimpleNamespace(name="attention")] if last else [SimpleNamespace(name="product"), stages[1]]

    class Pipeline:
        output_tensors = (torch.zeros(2),)

        def __init__(self, stages: list[Any]) -> None:
            self.stages = stages

        def __call__(self) -> Any:
            return self.output_tensors

        def sharing(self) -> Any:
            return Pipeline(shared)

    made = [way for way, _ in sanitizer_case.ways(Pipeline(stages))]
    assert made == ["", *([" making a schedule"] if last else []), " reading a schedule"]


def test_no_call_at_all_is_no_success(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sanitizer_case, "cases", lambda *options: [])
    assert sanitizer_case.main([]) == 1
