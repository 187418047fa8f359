"""One word for b, s and t: the grammar of vLLM's attention benchmark, wherever a problem's fields are given."""

from __future__ import annotations

import argparse
from typing import Any

import pytest

from mla_var3.cli import arguments
from mla_var3.errors import UserError
from mla_var3.lab.naming import batch_fields, with_batch
from mla_var3.lab.sweep import config as sweep_config
from mla_var3.lab.sweep.plan import expand_cells
from mla_var3.workload import get
from mla_var3.workload.decode import MlaProblem


@pytest.mark.parametrize(
    ("word", "fields"),
    [
        # The examples of that benchmark's own documentation, but for its single prompt.
        ("q1s1k", {"b": 1, "s": 1, "t": 1024}),
        ("8q1s1k", {"b": 8, "s": 1, "t": 1024}),
        ("q4s1k", {"b": 1, "s": 4, "t": 1024, "causal": True}),
        ("16q4s1k", {"b": 16, "s": 4, "t": 1024, "causal": True}),
        ("q2k", {"b": 1, "s": 2048, "t": 2048, "causal": True}),
        ("128q1s1k", {"b": 128, "s": 1, "t": 1024}),
        ("3q1s70", {"b": 3, "s": 1, "t": 70}),
        ("2q1s1k_q1s4k", {"b": 3, "s": 1, "t": 4096, "lengths": [1024, 1024, 4096]}),
        (
            "2q1k_3q1s1k",
            {"b": 5, "s": 1024, "t": 1024, "causal": True, "queries": [1024, 1024, 1, 1, 1]},
        ),
        (
            "q2s8_2q1s4",
            {"b": 3, "s": 2, "t": 8, "causal": True, "queries": [2, 1, 1], "lengths": [8, 4, 4]},
        ),
        ("2q1s4_q1s4", {"b": 3, "s": 1, "t": 4}),  # groups alike are one
    ],
)
def test_a_word_is_its_requests(word: str, fields: dict[str, Any]) -> None:
    assert batch_fields(word) == fields
    problem = MlaProblem.from_record(fields)
    requests = zip(problem.query_lens, problem.seq_lens, strict=True)
    assert list(requests) == list(_requests(word))


def _requests(word: str) -> Any:
    """(query tokens, length) of each request, by another reading of the grammar: number by number."""
    for group in word.split("_"):
        count, _, rest = group.partition("q")
        tokens, _, length = rest.partition("s")

        def number(text: str) -> int:
            return int(text.removesuffix("k")) * (1024 if text.endswith("k") else 1)

        yield from [(number(tokens), number(length or tokens))] * int(count or 1)


@pytest.mark.parametrize(
    ("word", "sentence"),
    [
        ("128", "batch '128': '128' is not [COUNT]qTOKENS[sLENGTH]: write it as 128q1s1k"),
        ("8q1s1k_", "batch '8q1s1k_': '' is not [COUNT]qTOKENS"),
        ("8q1s1m", "'8q1s1m' is not [COUNT]qTOKENS"),
        ("0q1s1k", "'0q1s1k' has no requests"),
        ("8q0s1k", "'8q0s1k' has no query tokens"),
        ("8q4s2", "'8q4s2' has 4 query tokens and a sequence of 2, which counts them"),
        ("9999999q1s1_q1s2", "lists 10,000,000 requests: give at most 1,048,576"),
    ],
)
def test_a_word_that_is_none_is_refused(word: str, sentence: str) -> None:
    with pytest.raises(UserError) as caught:
        batch_fields(word)
    assert sentence in str(caught.value)


def test_each_workload_takes_of_a_word_what_it_has() -> None:
    def of(workload: str, word: str, **others: Any) -> dict[str, Any]:
        return with_batch({"batch": word, **others}, get(workload).problem)

    assert of("layer", "8q1s1k") == {"b": 8, "t": 1024}
    assert of("prefill", "2q1k") == {"b": 2, "s": 1024, "t": 1024, "causal": True}
    assert of("prefill", "2q1k", causal=False) == {"b": 2, "s": 1024, "t": 1024, "causal": False}
    assert of("sparse_decode", "8q2s1k", h=64) == {"b": 8, "s": 2, "t": 1024, "h": 64}
    for workload, word, sentence in (
        ("layer", "8q2s1k", "workload layer does not take several query tokens"),
        ("prefill", "8q1s1k_2q64", "workload prefill does not take query tokens that differ"),
        ("norm", "8q1s1k", "workload norm does not take requests"),
        ("sparse_decode", "8q1s1k_q1s2k", "sparse_decode takes no list of lengths: give requests alike"),
    ):
        with pytest.raises(UserError, match=sentence):
            of(workload, word)
    for field in ("b", "t", "lengths"):
        with pytest.raises(UserError, match=f"batch '8q1s1k' says b, s, t, lengths, queries: leave {field} out"):
            of("decode", "8q1s1k", **{field: 3})


def test_every_verb_takes_it(capsys: pytest.CaptureFixture[str]) -> None:
    parser = arguments.Parser()
    arguments.add_problem(parser)

    def problem(*words: str) -> Any:
        return arguments.problem_of(parser.parse_args(words))

    one = problem("--batch", "128q1s1k", "--h", "16")
    assert (one.b, one.s, one.t, one.h) == (128, 1, 1024, 16)
    assert problem("--problem", "batch=128q1s1k,h=16") == one == problem("--h", "16", "--batch=128q1s1k")
    assert problem("--batch", "2q1k_32q1s1k").query_lens == (1024,) * 2 + (1,) * 32
    assert arguments.says_problem(parser.parse_args(["--batch", "q1s1"]))
    assert not arguments.says_problem(argparse.Namespace(**vars(parser.parse_args([]))))
    for words in (["--b", "3"], ["--t", "3"], ["--lengths", "ragged"], ["--lengths", "1,2"]):
        with pytest.raises(UserError, match=r"leave .* out"):
            problem("--batch", "8q1s1k", *words)


def test_cells_grids_and_overrides_take_it() -> None:
    def cells(*words: str) -> list[tuple[int, ...]]:
        return [(c.b, c.s, c.t, c.h) for c in expand_cells(sweep_config.compose(list(words)))]

    assert cells("experiment.cells=[{batch: 8q1s1k, h: 16}]") == [(8, 1, 1024, 16)]
    assert cells("experiment.cells=[]", "experiment.grid={batch: [8q1s1k, 4q2s2k], h: [16, 64]}") == [
        (8, 1, 1024, 16), (8, 1, 1024, 64), (4, 2, 2048, 16), (4, 2, 2048, 64),
    ]  # fmt: skip
    assert cells("experiment.cells=[{h: 16}, {h: 64}]", "problem.batch=8q1s1k") == [(8, 1, 1024, 16), (8, 1, 1024, 64)]
    with pytest.raises(UserError, match="leave t out"):
        cells("experiment.cells=[{t: 16}]", "problem.batch=8q1s1k")


def test_the_scripts_of_the_file_contract_take_it() -> None:
    pytest.importorskip("torch", reason="torch is not installed")
    from mla_var3.lab import contract

    made = contract.of_design("torch/flash_mla", fields={"batch": "2q3s70", "h": 4}, device="cpu")
    q, _, _, lengths, *_ = made.get_inputs()
    assert tuple(q.shape[:3]) == (2, 3, 4) and lengths.tolist() == [70, 70]
    with pytest.raises(UserError, match="leave b out"):
        contract.of_design("torch/flash_mla", fields={"batch": "2q3s70", "b": 4}, device="cpu")
