"""Libraries' top-k without the libraries: how they are called, and which of equal values their results are read as."""

from __future__ import annotations

import ctypes
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mla_var3.catalogue import libraries, registry
from mla_var3.errors import UserError
from mla_var3.kernel.peer import indexer_topk
from mla_var3.workload import topk
from mla_var3.workload.topk import TopkProblem

PROBLEM = TopkProblem(b=6, t=256, topk=70)


def attached(name: str, problem: TopkProblem, *inputs: Any) -> Any:
    plan: Any = registry.get_plan(registry.KernelId.parse(f"peer/{name}"))(problem, None, None)
    return plan.attach(libraries.Library(name, "object", Path("there.so"), "1", "an imitation"), *inputs)


@pytest.mark.parametrize("dist", ["normal", "ties", "equal", "close"])
def test_ties_are_read_as_the_lowest_columns_and_a_wrong_choice_stays_wrong(dist: str) -> None:
    inputs = topk.make_inputs(PROBLEM, seed=1, dist=dist)
    (want,) = topk.reference(PROBLEM, *inputs)
    made = attached("torch_topk", PROBLEM, *inputs)
    made.call()
    (found,) = made.read()
    assert torch.equal(found.long(), want.sort(1).values)
    wrong = inputs[0].argsort(1)[:, : PROBLEM.topk]  # the smallest
    read = indexer_topk.lowest_of_ties(inputs[0], wrong).long()
    assert torch.equal(read, want.sort(1).values) == (dist == "equal")
    none = torch.full((6, 70), -1)
    assert torch.equal(indexer_topk.lowest_of_ties(inputs[0], none), none.int())


@pytest.mark.parametrize("rows", [6, 600])
def test_sglang_is_called_as_in_decode_or_as_for_prompts(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    problem, calls = PROBLEM.replace(b=rows), []

    def choose(logits: Any, out: Any) -> None:
        out.copy_(logits.topk(out.shape[1]).indices)

    def paged(logits: Any, lengths: Any, table: Any, out: Any, page: int, schedule: Any, raw: Any) -> None:
        assert (table, page, raw) == (None, 1, None) and schedule.tolist()[0] == [7, 7]
        calls.append("paged")
        choose(logits, out)

    def ragged(logits: Any, lengths: Any, starts: Any, offsets: Any, out: Any) -> None:
        assert starts is None and not offsets.any() and bool((lengths == 256).all())
        calls.append("ragged")
        choose(logits, out)

    def plan(lengths: Any, schedule: Any, threshold: int) -> None:
        assert threshold == -1
        schedule.fill_(7)

    module = SimpleNamespace(topk_transform_paged=paged, topk_transform_ragged=ragged, topk_plan=plan)
    monkeypatch.setattr(indexer_topk, "_loaded", lambda path: module)
    inputs = topk.make_inputs(problem, seed=2)
    made = attached("sglang_topk", problem, *inputs)
    made.call()
    assert calls == ["paged" if rows == 6 else "ragged"]
    assert torch.equal(made.read()[0].long(), topk.reference(problem, *inputs)[0].sort(1).values)


def test_flashinfer_is_given_pointers_and_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[int, ...]] = []

    def function(*given: int) -> int:
        calls.append(given)
        return 1 if len(calls) > 1 else 0

    monkeypatch.setattr(ctypes, "CDLL", lambda path: SimpleNamespace(flashinfer_topk=function))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(cuda_stream=99))
    inputs = topk.make_inputs(PROBLEM, seed=2)
    made = attached("flashinfer_topk", PROBLEM, *inputs)
    made.call()
    assert calls[0][0] == inputs[0].data_ptr() and calls[0][3] == made.outputs[0].data_ptr()
    assert calls[0][5:] == (6, 256, 70, 99)
    with pytest.raises(UserError, match="failed with CUDA's error 1"):
        made.call()
    with pytest.raises(UserError, match="takes rows that follow each other"):
        attached("flashinfer_topk", PROBLEM.replace(t=200), *topk.make_inputs(PROBLEM.replace(t=200)))


@pytest.mark.parametrize(
    ("name", "fields", "said"),
    [
        ("torch_topk", {"dtype": "bf16"}, ""),
        ("torch_topk", {"topk": 5000}, ""),
        ("sglang_topk", {"dtype": "bf16"}, "peer/sglang_topk takes fp32; the problem is bf16"),
        ("flashinfer_topk", {"topk": 2049}, "is called for 1 to 2,048 of the row's logits"),
        ("flashinfer_topk", {"t": 100}, "is called for 1 to 2,048 of the row's logits"),
        ("sglang_topk", {"table": True}, "is called with rows of one length, without a page table"),
        ("torch_topk", {"lengths": "ragged"}, "is called with rows of one length"),
    ],
)
def test_what_is_taken(name: str, fields: dict[str, Any], said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(libraries._LOOK, name, lambda: libraries.Library(name, "object", Path(), "1", "an imitation"))
    plan: Any = registry.get_plan(registry.KernelId.parse(f"peer/{name}"))
    verdict = plan.requires.problem(TopkProblem(**fields))
    assert bool(verdict) == (not said) and said in verdict.reason
