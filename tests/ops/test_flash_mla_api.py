"""FlashMLA's interface without a GPU: its names and arguments, its results, and what is refused by name."""

from __future__ import annotations

import functools
import inspect
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from ops_fakes import CpuEngine  # noqa: E402

from mla_var3.errors import UserError  # noqa: E402
from mla_var3.ops import flash_mla as api  # noqa: E402
from mla_var3.ops.decode import mla_decode  # noqa: E402
from mla_var3.workload.decode import MlaProblem, make_inputs, mla_decode_reference  # noqa: E402

# Parameter and default of FlashMLA's function at 9241ae3; `...` stands for none.
PARAMETERS: dict[str, Any] = {
    "q": ..., "k_cache": ..., "block_table": ..., "cache_seqlens": ..., "head_dim_v": ...,
    "tile_scheduler_metadata": ..., "num_splits": None, "softmax_scale": None, "causal": False,
    "is_fp8_kvcache": False, "indices": None, "attn_sink": None, "extra_k_cache": None,
    "extra_indices_in_kvcache": None, "topk_length": None, "extra_topk_length": None,
}  # fmt: skip
PROBLEM = MlaProblem(h=4, s=2, b=3, t=1, lengths=[70, 0, 129])


@pytest.fixture(autouse=True)
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> CpuEngine:
    engine = CpuEngine()
    monkeypatch.setattr(api, "mla_decode", functools.partial(mla_decode, on=engine, kernel="torch/flash_mla"))
    monkeypatch.setattr(api, "engine", lambda: engine)
    return engine


def given(seed: int = 0) -> tuple[Any, ...]:
    return make_inputs(PROBLEM, "cpu", seed=seed)


def test_arguments_have_flash_mlas_names_order_and_defaults() -> None:
    found = inspect.signature(api.flash_mla_with_kvcache).parameters
    plain = {name: ... if p.default is inspect.Parameter.empty else p.default for name, p in found.items()}
    assert list(plain.items()) == [*PARAMETERS.items(), ("out", None), ("lse", None)]
    own = {name for name, p in found.items() if p.kind is inspect.Parameter.KEYWORD_ONLY}
    assert own == {"out", "lse"}, "what FlashMLA has not cannot be taken for what it has"


@pytest.mark.parametrize("arguments", [(), (torch.zeros(2, dtype=torch.int32), 128, 1)])
def test_metadata_takes_the_arguments_of_older_interfaces(arguments: tuple[Any, ...]) -> None:
    meta, nothing = api.get_mla_metadata(*arguments)
    assert isinstance(meta, api.FlashMLASchedMeta) and nothing is None
    assert not meta.have_initialized and meta.tile_scheduler_metadata is None and meta.num_splits is None
    assert api.get_mla_metadata(num_heads_q=128)[0] is not meta


@pytest.mark.parametrize("causal", [False, True])
def test_gives_flash_mlas_results(causal: bool) -> None:
    q, cache, table, lens = given()
    meta, splits = api.get_mla_metadata()
    out, lse = api.flash_mla_with_kvcache(q, cache, table, lens, 512, meta, splits, causal=causal)
    want_out, want_lse = mla_decode_reference(q, cache, table, lens, k=512, scale=576**-0.5, causal=causal)
    assert torch.equal(out, want_out.to(q.dtype)) and torch.equal(lse, want_lse.float())
    assert out.shape == (3, 2, 4, 512) and out.dtype == torch.bfloat16
    assert lse.shape == (3, 4, 2) and lse.dtype == torch.float32
    assert not out[1].any() and torch.isposinf(lse[1]).all(), "a request without keys"
    assert meta.have_initialized


@pytest.mark.parametrize(
    ("fields", "parts"),
    # num_sms / h_kv / ceil(s·h / h_kv / 64) of 132 multiprocessors, at least 1, in whole numbers
    [({}, 132), ({"h": 128}, 66), ({"h": 128, "s": 2}, 33), ({"h": 6, "h_kv": 3}, 44), ({"h": 100, "h_kv": 100}, 1)],
)
def test_metadata_has_flash_mlas_tensors_after_the_first_call(fields: dict[str, int], parts: int) -> None:
    tensors = make_inputs(MlaProblem(b=3, t=1, **{"h": 4, **fields}), "cpu")
    meta, _ = api.get_mla_metadata()
    api.flash_mla_with_kvcache(*tensors, 512, meta)
    plan, splits = meta.tile_scheduler_metadata, meta.num_splits
    assert plan is not None and splits is not None
    assert plan.shape == (parts, 8) and plan.dtype == torch.int32 and plan.device == tensors[0].device
    assert splits.shape == (4,) and splits.dtype == torch.int32 and splits.device == tensors[0].device


def test_tensors_of_the_metadata_may_be_copied_overwritten_and_passed_around() -> None:
    """As engines do it: buffers as large as there are multiprocessors and requests, whose first rows a graph reads."""
    tensors = given()
    meta, _ = api.get_mla_metadata()
    wanted = api.flash_mla_with_kvcache(*tensors, 512, meta)
    plan, splits = meta.tile_scheduler_metadata, meta.num_splits
    assert plan is not None and splits is not None
    rows, counts = torch.zeros(132, 8, dtype=torch.int32), torch.zeros(257, dtype=torch.int32)
    rows[: len(plan)].copy_(plan)
    counts[: len(splits)].copy_(splits)
    plan.fill_(-1)
    meta.tile_scheduler_metadata, meta.num_splits = rows[: len(plan)], counts[: len(splits)]
    for each, number in ((meta, None), (meta, meta.num_splits), (rows[: len(plan)], counts[: len(splits)])):
        found = api.flash_mla_with_kvcache(*tensors, 512, each, number)
        assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
    assert meta.tile_scheduler_metadata is not plan, "what a program put there stays there"


def test_fresh_metadata_keeps_the_tensors_that_a_program_gave_it() -> None:
    rows, counts = torch.zeros(1, 8, dtype=torch.int32), torch.zeros(4, dtype=torch.int32)
    meta, _ = api.get_mla_metadata()
    meta.tile_scheduler_metadata, meta.num_splits = rows, counts
    api.flash_mla_with_kvcache(*given(), 512, meta)
    assert meta.have_initialized and meta.tile_scheduler_metadata is rows and meta.num_splits is counts


def test_a_refused_call_leaves_metadata_fresh() -> None:
    q, cache, table, lens = given()
    meta, _ = api.get_mla_metadata()
    with pytest.raises(UserError, match="block_table has 2 rows and cache_seqlens 3 entries"):
        api.flash_mla_with_kvcache(q, cache, table[:2], lens, 512, meta)
    assert meta == api.get_mla_metadata()[0]


def test_tensors_in_place_of_metadata_are_of_no_group() -> None:
    """FlashMLA's older interface: two tensors, and calls of any shape with them."""
    rows, counts = torch.zeros(132, 8, dtype=torch.int32), torch.zeros(4, dtype=torch.int32)
    q, cache, table, lens = given()
    for b in (3, 2):
        out, lse = api.flash_mla_with_kvcache(
            q=q[:b], k_cache=cache, block_table=table[:b], cache_seqlens=lens[:b], head_dim_v=512,
            tile_scheduler_metadata=rows, num_splits=counts, softmax_scale=576**-0.5, causal=True,
        )  # fmt: skip
        want = mla_decode_reference(q[:b], cache, table[:b], lens[:b], k=512, scale=576**-0.5, causal=True)
        assert torch.equal(out, want[0].to(q.dtype)) and torch.equal(lse, want[1].float())


@pytest.mark.parametrize(("k", "p"), [(512, 0), (256, 64)])
def test_other_widths_have_their_own_default_scale(k: int, p: int) -> None:
    tensors = make_inputs(PROBLEM.replace(k=k, p=p), "cpu")
    out, lse = api.flash_mla_with_kvcache(*tensors, k, api.get_mla_metadata()[0])
    want = mla_decode_reference(*tensors, k=k, scale=(k + p) ** -0.5, causal=False)
    assert torch.equal(out, want[0].to(out.dtype)) and torch.equal(lse, want[1].float())


def test_a_cache_of_three_dimensions_is_of_the_same_group() -> None:
    q, cache, table, lens = given()
    meta, _ = api.get_mla_metadata()
    both = [api.flash_mla_with_kvcache(q, c, table.long(), lens.long(), 512, meta) for c in (cache, cache[:, :, 0])]
    assert torch.equal(both[0][0], both[1][0])


def test_the_scale_is_the_callers() -> None:
    q, cache, table, lens = given()
    _, lse = api.flash_mla_with_kvcache(q, cache, table, lens, 512, api.get_mla_metadata()[0], softmax_scale=1.0)
    assert torch.equal(lse, mla_decode_reference(q, cache, table, lens, k=512, scale=1.0, causal=False)[1].float())


def test_lengths_and_tensors_may_change_under_the_same_metadata(on_cpu: CpuEngine) -> None:
    meta, _ = api.get_mla_metadata()
    q, cache, table, lens = given()
    api.flash_mla_with_kvcache(q, cache, table, lens, 512, meta)
    for seed, lengths in ((1, [70, 0, 129]), (1, [64, 0, 65])):
        q, cache, table, lens = given(seed)
        lens.copy_(torch.tensor(lengths, dtype=torch.int32))
        out, lse = api.flash_mla_with_kvcache(q, cache, table, lens, 512, meta)
        want = mla_decode_reference(q, cache, table, lens, k=512, scale=576**-0.5, causal=False)
        assert torch.equal(out, want[0].to(q.dtype)) and torch.equal(lse, want[1].float())
    assert on_cpu.planned == 1


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda q, cache, table, lens: (q[:2], cache, table[:2], lens[:2]), "b is 2 and was 3"),
        (lambda q, cache, table, lens: (q[:, :1], cache, table, lens), "s_q is 1 and was 2"),
        (lambda q, cache, table, lens: (q[:, :, :2], cache, table, lens), "h_q is 2 and was 4"),
        (
            lambda q, cache, table, lens: (q, cache.view(-1, 32, 1, 576), table, lens),
            "page_block_size is 32 and was 64",
        ),
        (lambda q, cache, table, lens: (q, cache.view(-1, 64, 2, 576), table, lens), "h_k is 2 and was 1"),
    ],
)
def test_metadata_is_for_one_shape(change: Any, sentence: str) -> None:
    meta, _ = api.get_mla_metadata()
    tensors = make_inputs(PROBLEM.replace(lengths="uniform", t=128), "cpu")
    api.flash_mla_with_kvcache(*tensors, 512, meta)
    with pytest.raises(UserError, match=sentence):
        api.flash_mla_with_kvcache(*change(*tensors), 512, meta)


def test_metadata_is_for_one_mask() -> None:
    meta, _ = api.get_mla_metadata()
    api.flash_mla_with_kvcache(*given(), 512, meta)
    with pytest.raises(UserError, match="causal is True and was False"):
        api.flash_mla_with_kvcache(*given(), 512, meta, causal=True)


@pytest.mark.parametrize(
    "name",
    ["attn_sink", "extra_k_cache", "extra_indices_in_kvcache", "topk_length", "extra_topk_length"],
)
def test_arguments_of_sparse_attention_are_refused_by_name_without_indices(name: str) -> None:
    with pytest.raises(UserError, match=rf"^{name} was given without indices"):
        api.flash_mla_with_kvcache(*given(), 512, api.get_mla_metadata()[0], **{name: torch.zeros(1, 1)})


def test_an_fp8_cache_that_is_none_is_refused_by_name() -> None:
    with pytest.raises(UserError, match=r"^k_cache is torch.bfloat16: a cache of layout v32 holds e4m3fn codes"):
        api.flash_mla_with_kvcache(*given(), 512, api.get_mla_metadata()[0], causal=True, is_fp8_kvcache=True)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"block_table": None}, "block_table is None: dense attention needs it"),
        ({"cache_seqlens": None}, "cache_seqlens is None"),
        ({"head_dim_v": 600}, "head_dim_v = 600 latent columns of 576"),
        (
            {"k_cache": torch.zeros(9, 64, 656, dtype=torch.uint8)},
            "k_cache is torch.uint8: .* so pass is_fp8_kvcache=True for packed FP8 caches",
        ),
        ({"tile_scheduler_metadata": None}, "tile_scheduler_metadata is a NoneType: pass what get_mla_metadata"),
        ({"num_splits": 4}, "num_splits is a int: pass None, or a tensor"),
        ({"q": torch.zeros(3, 4, 576, dtype=torch.bfloat16)}, "must have four dimensions"),
    ],
)
def test_other_mistakes_are_named(changes: dict[str, Any], sentence: str) -> None:
    names = ("q", "k_cache", "block_table", "cache_seqlens")
    arguments: dict[str, Any] = dict(zip(names, given(), strict=True))
    arguments |= {"head_dim_v": 512, "tile_scheduler_metadata": api.get_mla_metadata()[0], **changes}
    with pytest.raises(UserError, match=sentence):
        api.flash_mla_with_kvcache(**arguments)
