"""SGLang's own registry, forward modes and attention classes call the plug-in, on a CPU, where SGLang can be imported.

Page tables are given, as kernels make them; torch computes in the place of our kernels.
"""

from __future__ import annotations

import functools
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("sglang", reason="SGLang is not installed: what it asks is held by test_contracts.py")

sys.path.insert(0, str(Path(__file__).parents[1] / "ops"))
from ops_fakes import CpuEngine  # noqa: E402

try:
    from sglang.srt.layers.attention import attention_registry
    from sglang.srt.layers.attention.dsa.dsa_topk_backend import DSATopKBackend
    from sglang.srt.layers.attention.dsa.utils import compute_dsa_seqlens
    from sglang.srt.model_executor.forward_batch_info import ForwardMode

    from mla_var3.engines import sglang as plug_in
    from mla_var3.engines.sglang import dense, sparse
except (ImportError, RuntimeError, AttributeError) as error:
    pytest.skip(f"SGLang cannot be imported here: {error}", allow_module_level=True)

from mla_var3.packed_cache import layout_of, pack, unpack  # noqa: E402

H, K, P, PAGE = 4, 512, 64, 64
LENGTHS, SCALE = (70, 129, 1), 192**-0.5


@pytest.fixture(autouse=True)
def _torch_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    for module, name, kernel in (
        (dense, "mla_decode", "torch/flash_mla"), (dense, "packed_mla_decode", "torch/sparse_mla"),
        (sparse, "sparse_mla_decode", "torch/sparse_mla"),
    ):  # fmt: skip
        monkeypatch.setattr(module, name, functools.partial(getattr(module, name), on=CpuEngine(), kernel=kernel))


@pytest.fixture
def rows() -> Any:
    return torch.randn(8 * PAGE, 1, K + P, generator=torch.Generator().manual_seed(0)).bfloat16()


#: The pages of each request, in a table that is wider than they need.
TABLE = torch.tensor([[3, 1, 0, 0], [2, 7, 5, 0], [4, 0, 0, 0]], dtype=torch.int32)


def backend_of(pool: Any, draft: int = 0, fp8: bool = False) -> Any:
    """One without SGLang's buffers, which need a model's runner."""
    made = object.__new__(dense.MlaVar3Backend)
    made.token_to_kv_pool = SimpleNamespace(get_key_buffer=lambda layer: pool)
    made.forward_metadata = SimpleNamespace(block_kv_indices=TABLE[:, :3], seq_lens_k=torch.tensor(LENGTHS).int())
    made.num_draft_tokens, made.is_fp8_kvcache, made.kv_lora_rank = draft, fp8, K
    return made


def layer(scale: Any = None) -> Any:
    return SimpleNamespace(layer_id=0, tp_q_head_num=H, head_dim=K + P, v_head_dim=K, scaling=SCALE, k_scale=scale)


def expected(queries: Any, keys: Any, lengths: tuple[int, ...]) -> Any:
    count, out = len(queries) // len(lengths), []
    pages = keys.reshape(-1, PAGE, K + P).float()
    for i, length in enumerate(lengths):
        cached = pages[TABLE[i].long()].flatten(0, 1)[:length]
        for j in range(count):
            seen = cached[: length - count + j + 1]
            scores = queries[i * count + j].view(H, K + P).float() @ seen.T * SCALE
            out.append((scores.softmax(-1) @ seen[:, :K]).flatten() if len(seen) else torch.zeros(H * K))
    return torch.stack(out)


def near(found: Any, wanted: Any) -> bool:
    return bool((found.float() - wanted).norm() < 0.01 * wanted.norm())


@pytest.mark.parametrize("fp8", [False, True])
def test_decode(fp8: bool, rows: Any) -> None:
    scale = torch.tensor(0.25)
    pool = (rows.float() / scale).to(torch.float8_e4m3fn) if fp8 else rows
    queries = torch.randn(3, H * (K + P)).bfloat16()
    batch = SimpleNamespace(forward_mode=ForwardMode.DECODE, batch_size=3, seq_lens=torch.tensor(LENGTHS))
    out = backend_of(pool, fp8=fp8).forward(queries, None, None, layer(scale if fp8 else None), batch)
    assert near(out, expected(queries, pool.float() * scale if fp8 else rows, LENGTHS))


@pytest.mark.parametrize("mode", ["TARGET_VERIFY", "DRAFT_EXTEND_V2"])
def test_drafted_tokens(mode: str, rows: Any) -> None:
    queries = torch.randn(6, H * (K + P)).bfloat16()
    before = torch.tensor(LENGTHS) - 2
    batch = SimpleNamespace(forward_mode=ForwardMode[mode], batch_size=3, seq_lens=before)
    out = backend_of(rows, draft=2).forward(queries, None, None, layer(), batch)
    assert near(out, expected(queries, rows, LENGTHS))


def test_new_tokens_are_written_first(rows: Any) -> None:
    made, written = backend_of(rows), []
    made.token_to_kv_pool.set_kv_buffer = lambda *given: written.append(given)
    queries = torch.randn(3, H * (K + P)).bfloat16()
    batch = SimpleNamespace(
        forward_mode=ForwardMode.DECODE, batch_size=3, seq_lens=torch.tensor(LENGTHS), out_cache_loc=torch.arange(3),
        out_cache_loc_swa=None, out_cache_loc_is_physical=True,
    )  # fmt: skip
    made.forward(queries, queries, queries, layer(), batch)
    made.forward(queries, queries, queries, layer(), batch, save_kv_cache=False)
    assert len(written) == 1


def sparse_backend(topk: str = "sgl-kernel", fused: bool = True, pools: int = 1, host: Any = None) -> Any:
    made = object.__new__(sparse.MlaVar3SparseBackend)
    made.dsa_kv_cache_store_fp8, made.kv_cache_dim, made.physical_page_size = True, 656, PAGE
    made.dsa_topk_backend, made.use_fused_topk = DSATopKBackend(topk), fused
    made.dsa_index_kpool, made.hisparse_coordinator = pools, host
    return made


@pytest.mark.parametrize(("pools", "large"), [(1, True), (1, False), (2, True)])
def test_sparse(pools: int, large: bool, rows: Any) -> None:
    made, counted = sparse_backend(pools=pools), pools == 1 and large
    cache = pack(layout_of("v32"), rows.view(-1, PAGE, K + P))
    slots = torch.full((3, 64), -1, dtype=torch.int32)
    for i in range(3):
        chosen = torch.arange(min(LENGTHS[i], 64))
        slots[i, : len(chosen)] = TABLE[i, chosen // PAGE] * PAGE + chosen % PAGE
    lens = compute_dsa_seqlens(torch.tensor(LENGTHS), 64).int()
    assert [int(x) for x in (slots >= 0).sum(-1)] == lens.tolist()
    if counted:
        slots[2, 1:] = slots[1, 1:]  # behind the count nothing is read
    queries = torch.randn(3, H, K + P).bfloat16()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sparse, "get_device_capability", lambda: (9, 0))
        patch.setattr(sparse.registry, "missing", lambda language: None)
        patch.setattr(sparse, "pays", lambda tokens, heads: large and (tokens, heads) == (3, H))
        out = made._forward_flashmla_kv(
            q_all=queries, kv_cache=cache.view(-1, 1, 656), sm_scale=SCALE, v_head_dim=K, layer=layer(),
            metadata=SimpleNamespace(dsa_cache_seqlens_int32=lens), page_table_1=slots,
        )  # fmt: skip
    wanted = expected(queries, unpack(layout_of("v32"), cache), tuple(min(n, 64) for n in LENGTHS))
    assert out.shape == (3, 1, H, K) and near(out.flatten(1), wanted)


@pytest.mark.parametrize(
    ("options", "rows", "passed"),
    [
        ({}, 3, True),
        ({"topk": "torch", "fused": False}, 3, True),
        ({"topk": "flashinfer"}, 3, True),
        ({"topk": "flashinfer", "fused": False}, 3, False),
        ({"pools": 2}, 3, False),
        ({"host": "a part of the cache"}, 3, False),
        ({}, 4, False),
    ],
)
def test_counts_are_passed_where_slots_that_count_come_first(options: dict[str, Any], rows: int, passed: bool) -> None:
    lens = torch.tensor([64, 64, 1], dtype=torch.int32)
    found = sparse.topk_lens(sparse_backend(**options), SimpleNamespace(dsa_cache_seqlens_int32=lens), rows)
    assert found is (lens if passed else None)


def test_sglangs_own_topk_puts_slots_that_count_first() -> None:
    """Of rows that are shorter than the number of slots: what torch chooses, in the order of scores."""
    scores, lengths = torch.randn(3, 200), torch.tensor([5, 64, 0])
    chosen = DSATopKBackend.TORCH.topk_func(scores, lengths, 64)
    assert ((chosen >= 0) == (torch.arange(64) < lengths[:, None])).all()


def test_the_name_is_registered(monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang.srt.arg_groups import choices
    from sglang.srt.models.deepseek_common.attention_backend_handler import AttentionBackendRegistry

    monkeypatch.setenv(plug_in.SPARSE, "1")
    for _ in range(2):
        plug_in.register()
    assert choices.ATTENTION_BACKEND_CHOICES.count("mla_var3") == 1
    assert AttentionBackendRegistry.get_handler("mla_var3") is AttentionBackendRegistry.get_handler("flashmla")
    assert attention_registry.ATTENTION_BACKENDS["mla_var3"] is plug_in._dense
    assert attention_registry.ATTENTION_BACKENDS["dsa"] is plug_in._sparse


def test_what_is_not_served_falls_back_with_a_reason(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(dense, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(dense, "get_parallel", lambda: SimpleNamespace(dcp_enabled=False))
    monkeypatch.setattr(dense.registry, "missing", lambda language: None)
    runner = SimpleNamespace(use_mla_backend=True, page_size=64, kv_cache_dtype=torch.bfloat16)
    assert dense.why_not(runner) is None
    monkeypatch.setitem(attention_registry.ATTENTION_BACKENDS, "flashinfer", lambda runner: "theirs")
    runner.page_size = 1
    assert dense.create(runner) == "theirs"
    assert "mla_var3 does not serve this model: a page has 1 tokens, and --page-size 64 is needed." in caplog.text


@pytest.mark.parametrize(
    ("major", "packed", "width", "missing", "reason"),
    [
        (10, True, 656, None, "the GPU is none of Hopper's"),
        (9, False, 576, None, "the cache is not one of 656 bytes a token, which --kv-cache-dtype fp8_e4m3 makes"),
        (9, True, 528, None, "the cache has 528 bytes a token, and not 656"),
        (9, True, 656, "cute-dsl needs a package.", "cute-dsl needs a package."),
    ],
)
def test_sparse_calls_that_are_not_served_fall_back_with_a_reason(
    major: int, packed: bool, width: int, missing: str | None, reason: str, monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    monkeypatch.setattr(sparse, "get_device_capability", lambda: (major, 0))
    monkeypatch.setattr(sparse.registry, "missing", lambda language: missing)
    monkeypatch.setattr(sparse.DeepseekSparseAttnBackend, "_forward_flashmla_kv", lambda self, *_, **__: "theirs")
    made = object.__new__(sparse.MlaVar3SparseBackend)
    made.dsa_kv_cache_store_fp8, made.kv_cache_dim, made.physical_page_size = packed, width, PAGE
    for _ in range(2):
        out = made._forward_flashmla_kv(
            q_all=None, kv_cache=None, sm_scale=SCALE, v_head_dim=K, layer=layer(), metadata=None, page_table_1=None
        )
        assert out == "theirs"
    assert caplog.text.count(f"mla_var3 does not compute what dsa calls FlashMLA for: {reason}") == 1
