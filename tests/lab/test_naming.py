"""lab.naming: what people read of a problem says the problem, and nothing else."""

from __future__ import annotations

import dataclasses
import random
from functools import cache
from typing import Any

import pytest

from mla_var3 import cli, workload
from mla_var3.cli.arguments import problem_of
from mla_var3.errors import UserError
from mla_var3.lab import naming
from mla_var3.workload.decode import MlaProblem
from mla_var3.workload.sparse_decode import SparseProblem

DECODE: list[dict[str, Any]] = [
    {"b": 128, "t": 4096},
    {"b": 4, "s": 2, "t": 300, "h": 16, "causal": True, "dtype": "fp16", "page": None},
    {"b": 3, "t": 128, "h": 32, "h_kv": 2, "k": 256, "p": 32, "d": 64, "page": 16},
    {"b": 2, "lengths": {"name": "ragged", "seed": 3}},
    {"lengths": [70, 0, 128], "b": 3, "softmax_scale": 0.25},
    {"b": 2, "s": 3, "tree": True, "strided_pages": True},
    {"b": 2, "queries": [3, 5], "causal": True},
    {"b": 2, "queries": [3, 5], "causal": True, "strided": True},
    {"b": 128, "t": 4096, "strided_out": True},
    {"b": 9, "queries": {"total": 40}},
]


@cache
def problems(name: str) -> tuple[Any, ...]:
    """Of a workload: its default, what the check runs, what `unseen` draws, and of decode some of every kind."""
    kind = workload.get(name)
    found = [kind.problem(), *kind.case_problems(kind.problem.from_record(kind.sample(False, {})))]
    if kind.draw is not None:
        found += [kind.problem.from_record(kind.draw(random.Random(seed))) for seed in range(30)]
    if kind.problem is MlaProblem:
        found += [MlaProblem(**fields) for fields in DECODE]
    return tuple(dict.fromkeys(found))


@pytest.mark.parametrize("name", workload.names())
def test_the_options_of_a_problem_say_that_problem(name: str) -> None:
    parser = cli.parser_of("bench")
    for problem in problems(name):
        words = naming.options(problem)
        assert problem_of(parser.parse_args(["kernel", *words]), workload.get(name)) == problem, words


@pytest.mark.parametrize("name", workload.names())
def test_two_problems_have_two_names_and_two_places(name: str) -> None:
    """Of merge, tokens and heads are rows alone: problems with as many of them are the same work."""
    cells = {naming.cell_name(problem): problem for problem in problems(name)}
    assert len(cells) == len(problems(name))
    assert all(cell.startswith(problem.label) for cell, problem in cells.items())
    assert sorted(problems(name), key=naming.listed) == sorted(cells.values(), key=naming.listed)
    if name in naming.NAMING:
        assert {naming.place(problem) for problem in cells.values()} != {(1, 1)}
        assert all(isinstance(number, int) for problem in cells.values() for number in naming.place(problem))


def test_every_row_is_of_a_workload() -> None:
    """A workload may be without one, as that of tests/workload/test_adding_one.py is."""
    assert {*naming.NAMING} <= {*workload.names()}


def test_a_field_that_a_label_leaves_out_is_in_the_name() -> None:
    """Each field of a workload, changed alone, changes the name; what has no effect on its own is named here."""
    alone = {"lengths", "queries", "extra_t", "extra_page", "extra_lengths"}
    for name in ("decode", "sparse_decode", "gemm", "norm", "layer"):
        kind = workload.get(name)
        default = kind.problem()
        for field in dataclasses.fields(kind.problem):
            value = getattr(default, field.name)
            if field.name in alone or isinstance(value, str) or value is None:
                continue
            change = (not value) if isinstance(value, bool) else value * 2 or 64
            try:
                other = default.replace(**{field.name: change})
            except UserError:  # another field has to change with it
                continue
            assert naming.cell_name(other) != naming.cell_name(default), (name, field.name)


def test_how_a_problem_of_sparse_decode_reads() -> None:
    served = SparseProblem(b=64, contexts="lognormal:7", missing="end:0.25", strided=True)
    assert served.label == "v32_b64_s1_h128_top2048_lognormal"
    assert naming.cell_name(served) == f"{served.label}_strided_seed7_end0.25"
    assert naming.panel(served) == "v32, 128 heads × 1, top 2048, contexts lognormal:7, missing end:0.25, strided"
    assert naming.words(served) == (
        "64 requests of 1 query token, 128 heads, 2048 of 32768 cached tokens, contexts lognormal:7, missing end:0.25, "
        "layout v32, q and indices strided"
    )
    words = ["--b", "64", "--problem", "contexts=lognormal:7,missing=end:0.25,strided=true"]
    assert sorted(naming.options(served)) == sorted(words)
    plain = served.replace(contexts="full", missing="", strided=False)
    assert naming.cell_name(plain) == plain.label == "v32_b64_s1_h128_top2048"


def test_how_a_decode_problem_reads() -> None:
    apart = MlaProblem(h=16, strided_pages=True)
    assert naming.cell_name(apart) == "b1_s1_h16_t4096_strided"
    assert naming.cell_name(MlaProblem(d=64)) == "b1_s1_h128_t4096_d64"
    assert naming.geometry(apart) == "latent 512+64, pages of 64 further apart"
    assert naming.panel(apart) == "16 heads × 1, strided" and naming.place(apart) == (1, 4096)
    assert naming.options(apart) == ["--b", "1", "--h", "16", "--problem", "strided_pages=true"]
    assert naming.words(MlaProblem(b=2, t=1)) == "2 requests of 1 cached token, 1 query token, 128 heads"
    assert [naming.phase(MlaProblem(s=s)) for s in (64, 65)] == ["decode", "prefill"]
