"""New tokens into a packed cache and an index cache at once, without a GPU: the bytes of the two functions, and what is
refused."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: E402

from mla_var3.check.judge import check  # noqa: E402
from mla_var3.device import Device  # noqa: E402
from mla_var3.dispatch import choose  # noqa: E402
from mla_var3.errors import UserError  # noqa: E402
from mla_var3.ops import index_append, indexed_append, rope_append  # noqa: E402
from mla_var3.packed_cache import layout_of, new_cache  # noqa: E402
from mla_var3.workload import indexed_append as workload  # noqa: E402
from mla_var3.workload.indexed_append import IndexedAppendProblem  # noqa: E402

BOTH, PACKED, INDEX = "torch/indexed_append", "torch/packed_append", "torch/index_append"
SMALL = IndexedAppendProblem(tokens=5, h=4, positions=300)

pytestmark = pytest.mark.usefixtures("on_cpu")


def given(problem: IndexedAppendProblem, dist: str = "normal") -> dict[str, Any]:
    names = ("q", "latent", "rope", "positions", "slots", "table", "k", "weight", "bias")
    return dict(zip(names, workload.make_inputs(problem, seed=3, dist=dist), strict=True))


def caches(problem: IndexedAppendProblem) -> dict[str, Any]:
    kv_cache = new_cache(layout_of("v32"), problem.pages, problem.page, "cpu").view(torch.uint8).fill_(7)
    index_cache = torch.full((problem.pages * problem.page // 64, 64, 132), 7, dtype=torch.uint8)
    out = torch.full((problem.tokens, problem.h, 576), 7.0, dtype=torch.bfloat16)
    return {"out": out, "kv_cache": kv_cache, "index_cache": index_cache}


@pytest.mark.parametrize("dist", ["normal", "skipped", "beyond"])
@pytest.mark.parametrize(
    "fields", [{}, {"interleaved_keys": True, "powers": False}, {"powers_of_keys": False, "page": 128}], ids=str
)
def test_bytes_are_those_of_the_two_functions(fields: dict[str, Any], dist: str) -> None:
    problem = SMALL.replace(**fields)
    x, one, two = given(problem, dist), caches(problem), caches(problem)
    of_keys: dict[str, Any] = {"interleaved_keys": problem.interleaved_keys, "powers_of_keys": problem.powers_of_keys}
    indexed_append(**x, **one, powers=problem.powers, **of_keys, kernel=BOTH)
    k, weight, bias = x.pop("k"), x.pop("weight"), x.pop("bias")
    index_cache = two.pop("index_cache")
    rope_append(**x, **two, layout="v32", powers=problem.powers, kernel=PACKED)
    index_append(
        k, weight, bias, x["positions"], x["slots"], x["table"], index_cache, interleaved=problem.interleaved_keys,
        powers=problem.powers_of_keys, kernel=INDEX,
    )  # fmt: skip
    assert torch.equal(one["index_cache"], index_cache) and bool((index_cache != 7).any())
    assert torch.equal(one["kv_cache"], two["kv_cache"]) and bool((one["kv_cache"] != 7).any())
    assert torch.equal(one["out"].view(torch.int16), two["out"].view(torch.int16))


def test_the_operator_writes_the_same_and_is_traced() -> None:
    x, one, two = given(SMALL), caches(SMALL), caches(SMALL)
    indexed_append(**x, **one, kernel=BOTH)
    torch.ops.mla_var3.indexed_append(**x, **two, version=BOTH)
    assert all(torch.equal(one[name], two[name]) for name in ("kv_cache", "index_cache"))
    with FakeTensorMode() as mode:
        fakes = {name: mode.from_tensor(tensor) for name, tensor in {**x, **two}.items()}
        assert indexed_append(**fakes) is None  # type: ignore[func-returns-value]


def test_rows_of_the_indexers_keys_may_lie_apart() -> None:
    x, one, two = given(SMALL), caches(SMALL), caches(SMALL)
    wide = torch.empty(5, 131, dtype=torch.bfloat16)  # no multiple of 16 bytes: copied
    wide[:, 3:] = x["k"]
    indexed_append(**x, **one, kernel=BOTH)
    indexed_append(**{**x, "k": wide[:, 3:]}, **two, kernel=BOTH)
    assert torch.equal(one["index_cache"], two["index_cache"])


def test_the_oracle_passes_its_own_cases() -> None:
    from mla_var3.catalogue import registry

    plan = registry.get_plan(registry.KernelId.parse(BOTH))
    report = check(plan(SMALL), device="cpu")
    assert report.ok, report.reason
    assert len(report.cases) >= 15


def test_hopper_has_a_version_and_others_have_none() -> None:
    assert choose(IndexedAppendProblem(), Device.get("h200")).kernel.label == "cute-dsl/indexed_append"
    with pytest.raises(UserError, match="indexed_append"):
        choose(IndexedAppendProblem(), Device.get("a100"))


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"layout": "flat"}, "problem.layout = 'flat'"),
        ({"page": 16}, "problem.page = 16"),
        ({"rest_of_keys": -1}, "rest_of_keys"),
        ({"interleaved_keys": 1}, "problem.interleaved_keys = 1"),
    ],
)
def test_what_makes_no_sense_is_told(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=said):
        IndexedAppendProblem(**fields)


def test_mistakes_are_told_of_the_argument() -> None:
    x = {**given(SMALL), **caches(SMALL)}

    def refused(said: str, **changed: Any) -> None:
        with pytest.raises(UserError, match=said) as error:
            indexed_append(**{**x, **changed}, kernel=BOTH)
        assert str(error.value).count(". ") == 0

    refused(r"^q is \(5, 4, 192\) torch.float16", q=x["q"].half())
    refused(r"^latent is \(5, 448\)", latent=x["latent"][:, :448])
    refused(r"^k is \(5, 64\)", k=x["k"][:, :64])
    refused(r"^bias is \(64,\)", bias=x["bias"][:64])
    refused(r"^slots is \(5,\) torch.int32", slots=x["slots"].int())
    refused("^index_cache is", index_cache=x["index_cache"][..., :100])
    for page in (16, 48):
        of = rf"^kv_cache has pages of {page} tokens: beside an index cache pass a multiple of 64\.$"
        refused(of, kv_cache=new_cache(layout_of("v32"), 2, page, "cpu"))
