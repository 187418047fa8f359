"""MlaProblem: construction, lengths, and costs checked against counts made another way."""

from __future__ import annotations

import random
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from mla_var3 import workload
from mla_var3.errors import UserError
from mla_var3.lab.naming import model_dims
from mla_var3.workload import decode
from mla_var3.workload.decode import MOST_DRAWN, SERVED_HEADS, MlaProblem, draw
from mla_var3.workload.mixed import MixedProblem
from mla_var3.workload.prefill import PrefillProblem


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"b": 0}, "problem.b"),
        ({"s": -1}, "problem.s"),
        ({"t": 1.5}, "problem.t"),
        ({"h": 6, "h_kv": 4}, "problem.h"),
        ({"dtype": "bf61"}, "bf16"),
        ({"page": 0}, "problem.page"),
        ({"causal": "yes"}, "problem.causal"),
        ({"lengths": "raged"}, "ragged"),
        ({"lengths": {"seed": 1}}, "problem.lengths"),
        ({"b": 3, "lengths": [1, 2]}, "problem.lengths"),
        ({"b": 2, "lengths": [1, -2]}, "problem.lengths"),
    ],
)
def test_bad_field_is_named(fields: dict, named: str) -> None:
    with pytest.raises(UserError, match=named.replace(".", r"\.")):
        MlaProblem(**fields)


def test_lengths_as_t() -> None:
    pd = MlaProblem(t=[3, 70, 0], s=2)
    assert (pd.b, pd.t, pd.seq_lens, pd.max_pages) == (3, 70, (3, 70, 0), 2)


@pytest.mark.parametrize("name", ["ragged", "normal", "lognormal", "bimodal", "one_long", "mostly_empty", "edges"])
def test_named_lengths_repeat_and_survive_a_record(name: str) -> None:
    pd = MlaProblem(b=9, s=2, t=1000, lengths={"name": name, "seed": 5})
    again = MlaProblem.from_record(pd.to_record())
    assert again == pd and again.seq_lens == pd.seq_lens
    assert len(set(pd.seq_lens)) > 3
    assert max(pd.seq_lens) <= {"normal": 2000, "lognormal": 16000}.get(name, 1000)


def test_lengths_are_spread_as_their_names_say() -> None:
    def lengths(name: str) -> list[int]:
        return sorted(MlaProblem(b=400, t=3200, lengths={"name": name, "seed": 3}).seq_lens)

    long = lengths("one_long")
    assert long[-1] == 3200 and long[-2] <= 50 and long[0] >= 1
    assert lengths("bimodal").count(3200) == 200 and lengths("bimodal")[199] <= 200
    assert lengths("mostly_empty").count(0) == 300 and max(lengths("mostly_empty")) > 2500
    drawn = lengths("lognormal")
    assert 2600 < drawn[200] < 3900 and drawn[-1] > 5 * drawn[200]


def test_unequal_lengths_take_the_pages_they_use() -> None:
    pd = MlaProblem(b=32, t=65536, h=16, lengths={"name": "one_long", "seed": 1})
    used = sum(-(-x // 64) for x in pd.seq_lens)
    assert used < pd.num_pages <= used + used // 8 + 1 < 32 * pd.max_pages
    assert MlaProblem(b=3, t=640).num_pages == 30 and pd.replace(page=None).num_pages == 32 * pd.max_pages
    assert pd.input_bytes() < 1.2 * used * 64 * 1152


def test_problems_are_drawn_within_bounds_and_again_for_the_same_seed() -> None:
    drawn = [MlaProblem(**draw(random.Random(seed))) for seed in range(300)]
    assert [MlaProblem(**draw(random.Random(seed))) for seed in range(300)] == drawn
    assert {p.h for p in drawn} == set(SERVED_HEADS) and {p.s for p in drawn} == set(range(1, 9))
    assert min(p.b for p in drawn) == 1 and max(p.b for p in drawn) > 200
    assert max(sum(p.seq_lens) for p in drawn) < 2.5 * MOST_DRAWN  # a long tail may lie above its mean
    assert all(p.causal == (p.s > 1) for p in drawn)


def test_edges_hold_the_page_boundaries() -> None:
    assert MlaProblem(b=7, t=200, lengths="edges").seq_lens == (0, 1, 63, 64, 65, 199, 200)


def test_unknown_record_field_names_the_nearest() -> None:
    with pytest.raises(UserError, match="causal"):
        MlaProblem.from_record({"causl": True})


def test_class_ignores_b_t_and_lengths() -> None:
    a, b = MlaProblem(b=1, t=64), MlaProblem(t=[5, 9])
    assert a.problem_class() == b.problem_class() and a.problem_class().key() == b.problem_class().key()
    assert a.problem_class() != MlaProblem(causal=True).problem_class()


def test_pages_apart_are_another_class_and_only_then_in_a_record() -> None:
    plain, apart = MlaProblem(h=16), MlaProblem(h=16, strided_pages=True)
    assert "strided_pages" not in plain.to_record() and MlaProblem.from_record(apart.to_record()) == apart
    assert apart.problem_class() != plain.problem_class()
    assert apart.problem_class().key() == plain.problem_class().key() + "_strided"
    assert apart.cost() == plain.cost() and apart.input_bytes() > plain.input_bytes()
    with pytest.raises(UserError, match="page is None: give the page's tokens"):
        MlaProblem(page=None, strided_pages=True)
    with pytest.raises(UserError, match="strided_pages = 2 is not a boolean"):
        MlaProblem(strided_pages=2)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "fields", [{"b": 2}, {"b": 2, "s": 3, "tree": True}, {"b": 3, "queries": [2, 0, 1], "causal": True}]
)
def test_strided_tensors_are_another_class_and_only_then_in_a_record(fields: dict[str, Any]) -> None:
    plain = MlaProblem(h=16, t=70, **fields)
    for names, key in ((["strided"], "_apart"), (["strided_out"], "_outapart")):
        other = plain.replace(**dict.fromkeys(names, True))
        assert not {"strided", "strided_out"} & set(plain.to_record())
        assert MlaProblem.from_record(other.to_record()) == other
        assert other.problem_class().key() == plain.problem_class().key() + key
        assert other.cost() == plain.cost()
    torch = pytest.importorskip("torch")
    both = plain.replace(strided=True, strided_out=True)
    one, other = decode.make_inputs(plain), decode.make_inputs(both)
    for name, x, y in zip(("q", "cache", "page_table", "seq_lens", "fifth"), one, other, strict=False):
        assert torch.equal(x.nan_to_num(), y.nan_to_num())
        assert y.is_contiguous() != (name in ("q", "page_table")) and y.stride(-1) == 1
    made = [*other, *decode.new_outputs(both, other[0])]
    assert not made[-1].is_contiguous() and not made[-2].is_contiguous() and made[-1].stride(-1) > 1
    fifth = 0 if len(other) == 4 else other[4].untyped_storage().nbytes()
    assert both.input_bytes() == sum(x.untyped_storage().nbytes() for x in made) - fifth > plain.input_bytes()
    with pytest.raises(UserError, match="strided_out = 1 is not a boolean"):
        MlaProblem(strided_out=1)  # type: ignore[arg-type]


def test_public_figures_of_a_cell() -> None:
    """FLOPs = 2·b·s·h·t·1088, bytes = b·t·1152 + b·s·h·2176: the usual way to count dense MLA decode in bf16."""
    cost = MlaProblem(b=128, s=2, h=16, t=4096).cost()
    assert cost.flops == 2 * 128 * 2 * 16 * 4096 * 1088
    assert cost.bytes == 128 * 4096 * 1152 + 128 * 2 * 16 * 2176


SMALL = [
    MlaProblem(b=2, s=3, t=17, h=4, h_kv=2, k=32, p=8, d=16, causal=True, dtype="fp32"),
    MlaProblem(t=[0, 5, 40], s=2, h=4, k=32, p=8, d=16, causal=True, dtype="fp32"),
    MlaProblem(t=[1, 33], s=1, h=3, k=16, p=8, d=8, dtype="fp32"),
]


@pytest.mark.parametrize("pd", SMALL, ids=lambda p: p.label)
def test_pairs_equal_a_counted_mask(pd: MlaProblem) -> None:
    pairs = sum(
        1
        for length in pd.seq_lens
        for i in range(pd.s)
        for j in range(length)
        if not pd.causal or j <= length - pd.s + i
    )
    assert pd.cost().pairs == pairs


@pytest.mark.parametrize("pd", [p.replace(causal=False) for p in SMALL], ids=lambda p: p.label)
def test_flops_equal_torchs_counter(pd: MlaProblem) -> None:
    """Without a mask every product is done, so torch's own counter sees what `cost` derives."""
    import torch
    from torch.utils.flop_counter import FlopCounterMode

    def attend(width_qk: int, width_v: int) -> int:
        with FlopCounterMode(display=False) as counter:
            for length in pd.seq_lens:
                if length:
                    scores = torch.ones(pd.h, pd.s, width_qk) @ torch.ones(pd.h, width_qk, length)
                    scores @ torch.ones(pd.h, length, width_v)
        return counter.get_total_flops()

    assert pd.cost().flops == attend(pd.k + pd.p, pd.k)
    prompt = PrefillProblem(b=pd.b, s=pd.s, h=pd.h, p=pd.p, d=pd.d, dtype=pd.dtype)
    with FlopCounterMode(display=False) as counter:
        scores = torch.ones(pd.b * pd.h, pd.s, pd.d + pd.p) @ torch.ones(pd.b * pd.h, pd.d + pd.p, pd.s)
        scores @ torch.ones(pd.b * pd.h, pd.s, pd.d)
    assert prompt.cost().flops == counter.get_total_flops()


@pytest.mark.parametrize("pd", SMALL, ids=lambda p: p.label)
def test_bytes_equal_tensors(pd: MlaProblem) -> None:
    """Bytes are the sizes of the tensors a kernel cannot avoid touching, added up from torch tensors."""
    import torch

    dtype = pd.torch_dtype
    tokens = sum(pd.seq_lens)

    def size(*shape: int) -> int:
        return torch.empty(shape, dtype=dtype, device="meta").nbytes

    rows = (pd.b, pd.s, pd.h)
    assert pd.cost().bytes == size(tokens, pd.h_kv, pd.k + pd.p) + size(*rows, pd.k + pd.p) + size(*rows, pd.k)
    prompt = PrefillProblem(b=pd.b, s=pd.s, h=pd.h, p=pd.p, d=pd.d, dtype=pd.dtype)
    assert prompt.cost().bytes == 2 * size(*rows, pd.d + pd.p) + 2 * size(*rows, pd.d)


@pytest.mark.parametrize("pd", SMALL[1:], ids=lambda p: p.label)
def test_mixed_meets_decode_and_counts_pairs_of_both_forms(pd: MlaProblem) -> None:
    lengths = [x + 5 for x in pd.seq_lens]
    fields = {**{name: getattr(pd, name) for name in pd.fields()}, "t": max(lengths), "lengths": tuple(lengths)}
    assert MixedProblem(**fields).cost() == MlaProblem(**fields).cost()
    n = 4
    mixed = MixedProblem(**fields, n=n)
    flops = 0
    for length in lengths:
        for i in range(pd.s):
            for j in range(length):
                if not pd.causal or j <= length - pd.s + i:
                    latent = j < length - n
                    flops += 2 * pd.h * ((2 * pd.k + pd.p) if latent else (2 * pd.d + pd.p))
    assert mixed.cost().flops == flops
    new = n * len(lengths)
    old = sum(lengths) - new
    columns = old * (pd.k + pd.p) + new * pd.h * (2 * pd.d + pd.p)
    columns += pd.b * pd.s * pd.h * (2 * pd.k + 2 * pd.d + pd.p)
    assert mixed.cost().bytes == 4 * columns


def test_records_name_their_workload_and_old_ones_are_read() -> None:
    decode, mixed, prefill = MlaProblem(b=2, t=70), MixedProblem(b=2, t=70, n=3), PrefillProblem(s=70, causal=True)
    assert [workload.problem_from_record(x.to_record()) for x in (decode, mixed, prefill)] == [decode, mixed, prefill]
    assert workload.problem_from_record({**decode.to_record(), "n": 0}) == decode
    with pytest.raises(UserError, match="no field 'n'"):
        workload.problem_from_record({**decode.to_record(), "n": 3})
    old = {**MlaProblem(s=70, t=70, causal=True).to_record(), "n": 0, "workload": "prefill"}
    assert workload.problem_from_record(old) == prefill
    with pytest.raises(UserError, match="prefill"):
        workload.problem_from_record({"workload": "prefil"})


def test_queries_of_different_requests() -> None:
    """Every form says the same counts, and comes back from a record; the class is one for all counts."""
    problem = MlaProblem(b=4, h=16, t=100, s=2, queries={"chunks": 1, "tokens": 7})
    assert problem.query_lens == (7, 2, 2, 2) and problem.query_tokens == 13 and problem.s == 7 and problem.packed
    assert problem == MlaProblem(b=4, h=16, t=100, queries=[7, 2, 2, 2]) == MlaProblem.from_record(problem.to_record())
    spread = MlaProblem(b=4, h=16, t=100, queries={"total": 6})
    assert spread.query_lens == (2, 2, 1, 1) and spread.problem_class() == problem.problem_class()
    assert problem.cost().pairs == 13 * 100 and problem.replace(causal=True).cost().pairs == 13 * 100 - 21 - 3
    for fields, sentence in (
        ({"queries": [1]}, "queries has 1 entries for b = 4"),
        ({"queries": {"chunks": 1}}, "give the fields chunks and tokens, or total alone"),
        ({"queries": [1, -1, 1, 1]}, "not a whole number"),
        ({"tree": True, "causal": True}, "tree has a mask of its own"),
    ):
        with pytest.raises(UserError, match=sentence):
            MlaProblem(b=4, **fields)


def test_problems_have_the_default_models_heads_and_widths(repo_root: Path) -> None:
    """What the command line takes where no --model is given, without reading a file."""
    said = yaml.safe_load((repo_root / "conf" / "model" / "deepseek-v3.yaml").read_text())
    for name in workload.names():
        problem = workload.get(name).problem()
        same = {field: getattr(problem, field) for field in model_dims(said, type(problem))}
        assert same == {field: said[field] for field in same}, name
        assert same or name in ("norm", "indexer_logits", "topk", "indexer_topk", "index_append", "indexed_append"), (
            name
        )  # not of a model's heads


@pytest.mark.parametrize("name", workload.names())
def test_every_field_is_described(name: str) -> None:
    """Fields are options of the command line: a reader finds each in the class's docstring, or in that of its base."""
    kind = workload.get(name).problem
    said = " ".join(base.__doc__ or "" for base in kind.__mro__ if base.__module__.startswith("mla_var3"))
    assert [field for field in kind.fields() if not re.search(rf"\b{field}\b", said)] == []
