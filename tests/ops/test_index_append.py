"""New keys into the index cache, without a GPU: the function, its operator, and that logits read what it wrote."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: E402

from mla_var3.errors import UserError  # noqa: E402
from mla_var3.ops import index_append, indexer_logits  # noqa: E402
from mla_var3.workload import index_append as workload  # noqa: E402
from mla_var3.workload.index_append import IndexAppendProblem  # noqa: E402
from mla_var3.workload.indexer_logits import index_pages  # noqa: E402

APPEND = "torch/index_append"
SMALL = IndexAppendProblem(tokens=5, positions=300)


pytestmark = pytest.mark.usefixtures("on_cpu")


def call(problem: IndexAppendProblem, dist: str = "normal") -> tuple[tuple[Any, ...], Any, tuple[Any, Any]]:
    """Arguments but the cache, a cache, and (codes, scales) that are wanted in it."""
    inputs = workload.make_inputs(problem, seed=3, dist=dist)
    cache = torch.full((problem.pages, 64, 132), 7, dtype=torch.uint8)
    want = workload.appended(problem, *inputs, held=[x.double() for x in workload.views(cache)])
    return inputs, cache, want


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("powers", [False, True])
def test_the_cache_has_the_oracles_bytes_and_no_others(interleaved: bool, powers: bool) -> None:
    problem = SMALL.replace(interleaved=interleaved, powers=powers)
    inputs, cache, want = call(problem, "skipped")
    index_append(*inputs, cache.unsqueeze(2), interleaved=interleaved, powers=powers, kernel=APPEND)
    codes, scales = workload.views(cache)
    assert torch.equal(codes.double(), want[0]) and torch.equal(scales.double(), want[1])
    there = scales != 0x07070707
    assert int(there.sum()) == 3
    rounded = torch.frexp(scales.view(torch.float32)[there]).mantissa == 0.5
    assert bool(rounded.all()) == powers
    again = torch.full_like(cache, 7)
    torch.ops.mla_var3.index_append(*inputs, again, interleaved=interleaved, powers=powers, version=APPEND)
    assert torch.equal(again, cache)


def test_pages_and_rows_that_lie_apart_and_32_bit_slots() -> None:
    problem = SMALL.replace(index="int32")
    inputs, _, want = call(problem)
    apart = torch.zeros(problem.pages, 64 * 132 + 16, dtype=torch.uint8)
    cache = apart.as_strided((problem.pages, 64, 132), (64 * 132 + 16, 132, 1))
    wide = torch.empty(5, 131, dtype=torch.bfloat16)  # no multiple of 16 bytes: copied
    wide[:, 3:] = inputs[0]
    index_append(wide[:, 3:], *inputs[1:], cache, kernel=APPEND)
    at = inputs[4].long()
    assert torch.equal(index_pages(cache)[0][at // 64, at % 64].double(), want[0][at // 64, at % 64])
    assert not apart[:, 64 * 132 :].any()
    index_append(wide[:0, 3:], *inputs[1:3], inputs[3][:0], inputs[4][:0], inputs[5], cache, kernel=APPEND)


def test_logits_of_the_cache_are_those_of_the_keys() -> None:
    """Queries of ones against what was appended: the sum of a key's columns, as far as e4m3 goes."""
    inputs, cache, _ = call(SMALL)
    index_append(*inputs, cache, kernel=APPEND)
    keys, _ = workload.keys_of(SMALL, *inputs[:4], inputs[5])
    slots = inputs[4].long()
    order = slots.argsort()
    q = torch.zeros(1, 1, 16, 128, dtype=torch.float8_e4m3fn)
    q[..., 5] = torch.tensor(1.0).to(torch.float8_e4m3fn)
    table = torch.arange(SMALL.pages, dtype=torch.int32)[None]
    ends = torch.tensor([[SMALL.pages * 64]], dtype=torch.int32)
    weights = torch.full((1, 16), 1 / 16)
    cache[:] = torch.where(cache == 7, 0, cache)
    found = indexer_logits(q, cache, weights, ends, page_table=table, kernel="torch/mqa_logits")
    want = keys[order, 5].double().clamp(min=0.0)
    assert torch.allclose(found[0, slots[order]].double(), want, rtol=2**-4, atol=1e-3)
    assert bool((want > 0).any())


def test_operator_is_traced_and_mistakes_are_told_of_the_argument() -> None:
    inputs, cache, _ = call(SMALL)
    k, weight, bias, positions, slots, table = inputs
    with FakeTensorMode() as mode:
        fakes = [mode.from_tensor(x) for x in (*inputs, cache)]
        assert index_append(*fakes) is None  # type: ignore[func-returns-value]

    def refused(said: str, *given: Any) -> None:
        with pytest.raises(UserError, match=said) as error:
            index_append(*given, kernel=APPEND)
        assert str(error.value).count(". ") == 0

    refused(r"^k is \(5, 128\) torch.float32", k.float(), weight, bias, positions, slots, table, cache)
    refused(r"^k is \(5, 64\)", k[:, :64], weight, bias, positions, slots, table, cache)
    refused(r"^weight is \(64,\)", k, weight[:64], bias, positions, slots, table, cache)
    refused("^positions are torch.float32", k, weight, bias, positions.float(), slots, table, cache)
    refused(r"^slots is \(5,\) torch.int32", k, weight, bias, positions, slots.int(), table, cache)
    refused(r"^table is \(300, 32\)", k, weight, bias, positions, slots, table[:, :32], cache)
    refused(r"^cache is \(2, 64, 100\)", k, weight, bias, positions, slots, table, cache[..., :100])
    refused(
        "^cache has strides",
        k,
        weight,
        bias,
        positions,
        slots,
        table,
        cache.transpose(0, 1).contiguous().transpose(0, 1),
    )
