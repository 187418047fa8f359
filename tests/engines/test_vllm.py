"""vLLM's own metadata, builder and layer call the plug-in, where vLLM can be imported.

On a CPU torch computes what vLLM compiles (merging states, gathering the cache) and what our kernels do. On a GPU the
kernels do, from a compiler or a bundle of 16 heads.
"""

from __future__ import annotations

import functools
import pickle
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("vllm", reason="vLLM is not installed: what it asks is held by test_contracts.py")

sys.path.insert(0, str(Path(__file__).parents[1] / "ops"))
from ops_fakes import CpuEngine  # noqa: E402
from vllm.model_executor.layers.attention import mla_attention  # noqa: E402
from vllm.v1.attention.backend import AttentionCGSupport, CommonAttentionMetadata  # noqa: E402

from mla_var3.engines import told  # noqa: E402
from mla_var3.engines import vllm as plug_in  # noqa: E402
from mla_var3.engines.vllm import dense, prefill, releases, sparse  # noqa: E402
from mla_var3.packed_cache import layout_of, pack, unpack  # noqa: E402

H, K, P, D, PAGE = 16, 512, 64, 128, 64


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def where(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Where tensors are made."""
    if request.param == "cpu":
        torch_computes(monkeypatch)
    torch.set_default_device(request.param)
    yield request.param
    torch.set_default_device(None)


def torch_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    on = CpuEngine()
    monkeypatch.setattr(mla_attention, "PIN_MEMORY", False, raising=False)  # needs a GPU
    for module, name, kernel in (
        (dense, "mla_decode", "torch/flash_mla"), (dense, "packed_mla_decode", "torch/sparse_mla"),
        (sparse, "sparse_mla_decode", "torch/sparse_mla"), (prefill, "mla_prefill", None),
    ):  # fmt: skip
        options = {} if kernel is None else {"on": on, "kernel": kernel}
        monkeypatch.setattr(module, name, functools.partial(getattr(module, name), **options))


def config(cache: str = "auto", mode: str = "FULL_AND_PIECEWISE", draft: int = 0, dcp: int = 1) -> Any:
    """What builders read of vLLM's config."""
    from vllm.config import CUDAGraphMode

    text = SimpleNamespace(
        q_lora_rank=None, kv_lora_rank=K, qk_nope_head_dim=D, qk_rope_head_dim=P, v_head_dim=D, index_topk=128
    )
    drafts = SimpleNamespace(num_speculative_tokens=draft, parallel_drafting=False, method="mtp")
    return SimpleNamespace(
        model_config=SimpleNamespace(
            get_num_attention_heads=lambda parallel: H, hf_text_config=text, hf_config=text, dtype=torch.bfloat16,
            max_model_len=4096, get_head_size=lambda: K + P,
        ),
        parallel_config=SimpleNamespace(
            cp_kv_cache_interleave_size=1, decode_context_parallel_size=dcp, prefill_context_parallel_size=1
        ),
        compilation_config=SimpleNamespace(
            static_forward_context={}, cudagraph_mode=CUDAGraphMode[mode], max_cudagraph_capture_size=512
        ),
        cache_config=SimpleNamespace(cache_dtype=cache, block_size=PAGE),
        scheduler_config=SimpleNamespace(max_num_seqs=16, max_num_batched_tokens=1024),
        attention_config=SimpleNamespace(use_prefill_query_quantization=False, hisparse_config=None),
        speculative_config=drafts if draft else None, use_v2_model_runner=False,
    )  # fmt: skip


class Layer:
    """Weights, cache and requests, an implementation, and attention to compare with."""

    def __init__(self, requests: list[tuple[int, int]], settings: Any, impl: Any, cache: Any = None) -> None:
        generator = torch.Generator("cpu").manual_seed(0)

        def normal(*shape: int) -> Any:
            made = torch.randn(*shape, generator=generator, device="cpu")
            return made.bfloat16().to(torch.get_default_device())

        self.requests, self.settings, self.impl = requests, settings, impl
        self.queries = normal(sum(q for q, _ in requests), H, D + P)
        self.kv_b = normal(H * 2 * D, K) / 20
        pages = [-(-length // PAGE) for _, length in requests]
        self.rows = normal(sum(pages) + 1, PAGE, K + P) / 2
        self.cache = self.rows if cache is None else cache(self.rows)
        self.table = torch.zeros(len(requests), max(pages) + 1, dtype=torch.int32)
        taken = 1
        for i, count in enumerate(pages):
            self.table[i, :count] = torch.arange(taken, taken + count)
            taken += count
        self.prefill = prefill.MlaVar3PrefillBackend(H, (D + P) ** -0.5, K, D, P, D, settings)
        settings.compilation_config.static_forward_context["layer"] = self
        self.prefill_backend, self.q_lora_rank, self.kv_lora_rank = self.prefill, None, K
        self.qk_nope_head_dim, self.qk_rope_head_dim, self.v_head_dim = D, P, D
        self.num_heads, self.head_size = H, K + P

    def common(self, tokens: int = 0, requests: int = 0, most: int = 0) -> Any:
        """Metadata of a step; padded to so many tokens and requests, as in a graph."""
        counts = [q for q, _ in self.requests] + [0] * (requests - len(self.requests))
        starts = torch.tensor([0, *counts]).cumsum(0).int()
        lengths = torch.tensor([length for _, length in self.requests] + [0] * (requests - len(self.requests))).int()
        table = torch.cat([self.table, self.table.new_zeros(len(counts) - len(self.table), self.table.shape[1])])
        return CommonAttentionMetadata(
            query_start_loc=starts, query_start_loc_cpu=starts.cpu(), seq_lens=lengths, num_reqs=len(counts),
            num_actual_tokens=tokens or sum(counts), max_query_len=most or max(counts), max_seq_len=int(lengths.max()),
            block_table_tensor=table, slot_mapping=torch.zeros(tokens or sum(counts)).long(),
            seq_lens_cpu_upper_bound=lengths.cpu(),
        )  # fmt: skip

    def latent(self) -> Any:
        """Queries in latent space, as vLLM's layer makes them."""
        nope, rope = self.queries.split([D, P], -1)
        up = self.kv_b.view(H, 2 * D, K)[:, :D]
        return torch.einsum("nhd,hdk->nhk", nope.float(), up.float()).bfloat16(), rope

    def expected(self, rows: Any = None) -> Any:
        """(tokens, h, k): attention in latent space of all query tokens."""
        rows = self.rows if rows is None else rows
        query, out, first = torch.cat(self.latent(), -1).float(), [], 0
        for i, (count, length) in enumerate(self.requests):
            keys = rows[self.table[i].long()].flatten(0, 1)[:length].float()
            scores = torch.einsum("nhc,tc->nht", query[first : first + count], keys) * (D + P) ** -0.5
            seen = torch.arange(length) <= torch.arange(length - count, length)[:, None]
            probabilities = scores.masked_fill(~seen[:, None], -torch.inf).softmax(-1)
            out.append(torch.einsum("nht,tk->nhk", probabilities, keys[:, :K]))
            first += count
        return torch.cat(out)


def builder_of(layer: Layer, backend: Any) -> Any:
    spec = SimpleNamespace(block_size=PAGE, dtype=torch.bfloat16)
    return backend.get_builder_cls()(spec, ["layer"], layer.settings, torch.get_default_device())


def dense_impl(cache: str, monkeypatch: pytest.MonkeyPatch, second_runner: bool = False) -> Any:
    settings = SimpleNamespace(
        parallel_config=SimpleNamespace(cp_kv_cache_interleave_size=1, decode_context_parallel_size=1),
        use_v2_model_runner=second_runner,
    )
    for module in (mla_attention, dense):
        monkeypatch.setattr(module, "get_current_vllm_config", lambda: settings)
    return dense.MlaVar3Impl(
        num_heads=H, head_size=K + P, scale=(D + P) ** -0.5, num_kv_heads=1, alibi_slopes=None, sliding_window=None,
        kv_cache_dtype=cache, logits_soft_cap=None, attn_type="decoder", kv_sharing_target_layer_name=None,
        q_lora_rank=None, kv_lora_rank=K, qk_nope_head_dim=D, qk_rope_head_dim=P, qk_head_dim=D + P, v_head_dim=D,
        kv_b_proj=None,
    )  # fmt: skip


def near(found: Any, wanted: Any) -> bool:
    return bool((found.float() - wanted).norm() < 0.01 * wanted.norm())


MIXED = [(1, 70), (3, 129), (1, 64), (5, 5), (100, 180)]


def test_requests_of_any_lengths_are_one_call_and_graphs_padded(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    layer = Layer(MIXED, config(mode="FULL"), dense_impl("auto", monkeypatch))
    builder = builder_of(layer, dense.MlaVar3Backend)
    assert builder.get_cudagraph_support(layer.settings, None) is AttentionCGSupport.ALWAYS
    assert builder.reorder_batch_threshold == 512
    metadata = builder.build(0, layer.common())
    assert (metadata.num_decodes, metadata.num_prefills) == (5, 0)
    out, lse = layer.impl.forward_mqa(layer.latent(), layer.cache, metadata, layer)
    assert near(out, layer.expected()) and lse is None
    # A graph for more tokens and requests.
    padded = layer.common(tokens=128, requests=16, most=128)
    metadata = builder.build_for_cudagraph_capture(padded)
    rows = torch.cat([torch.cat(layer.latent(), -1), torch.zeros(18, H, K + P).bfloat16()])
    out, _ = layer.impl.forward_mqa(rows, layer.cache, metadata, layer)
    assert near(out[:110], layer.expected())
    # One request that is shorter than its graph.
    layer = Layer([(3, 129)], config(), layer.impl)
    metadata = builder.build(0, layer.common(tokens=8, most=8))
    rows = torch.cat([torch.cat(layer.latent(), -1), torch.zeros(5, H, K + P).bfloat16()])
    assert near(layer.impl.forward_mqa(rows, layer.cache, metadata, layer)[0][:3], layer.expected())


def test_a_graph_of_requests_with_fewer_tokens_than_the_host_says(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second model runner of vLLM 0.33 captures one for any mixture of up to so many query tokens."""
    layer = Layer([(1, 70), (2, 129)], config(draft=2), dense_impl("auto", monkeypatch, second_runner=True))
    if not releases.release().trims:
        pytest.skip("this release has no such graphs")
    metadata = builder_of(layer, dense.MlaVar3Backend).build(0, layer.common(tokens=6, most=3))
    rows = torch.cat([torch.cat(layer.latent(), -1), torch.zeros(3, H, K + P).bfloat16()])
    out, _ = layer.impl.forward_mqa(rows, layer.cache, metadata, layer)
    assert near(out[:3], layer.expected())


@pytest.mark.parametrize("count", [1, 3])
def test_even_requests_and_their_lse(count: int, where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    layer = Layer([(count, 70), (count, 129)], config(draft=count - 1), dense_impl("auto", monkeypatch))
    layer.impl.need_to_return_lse_for_decode = True
    metadata = builder_of(layer, dense.MlaVar3Backend).build(0, layer.common())
    out, lse = layer.impl.forward_mqa(layer.latent(), layer.cache, metadata, layer)
    assert near(out, layer.expected()) and lse.shape == (2 * count, H)
    query = torch.cat(layer.latent(), -1)[-1].float()  # the last token sees all keys of the last request
    keys = layer.rows[layer.table[1].long()].flatten(0, 1)[:129].float()
    assert torch.allclose(lse[-1], (query @ keys.T * (D + P) ** -0.5).logsumexp(-1), atol=1e-2)


def test_a_cache_in_fp8_with_one_scale(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    scale = torch.tensor(0.25)
    layer = Layer(
        [(2, 70), (2, 129)], config("fp8", draft=1), dense_impl("fp8", monkeypatch),
        lambda rows: (rows.float() / scale).to(torch.float8_e4m3fn),
    )  # fmt: skip
    layer._k_scale = scale  # type: ignore[attr-defined]
    builder = builder_of(layer, dense.MlaVar3Backend)
    assert builder.get_cudagraph_support(layer.settings, None) is AttentionCGSupport.UNIFORM_BATCH
    assert builder.reorder_batch_threshold == 2 and not layer.impl.supports_quant_query_input
    metadata = builder.build(0, layer.common())
    out, _ = layer.impl.forward_mqa(layer.latent(), layer.cache, metadata, layer)
    assert near(out, layer.expected(layer.cache.float() * scale))


def test_longer_prompts_go_to_the_prefill_backend(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    layer = Layer([(1, 70), (150, 150), (140, 140)], config(), dense_impl("auto", monkeypatch))
    metadata = builder_of(layer, dense.MlaVar3Backend).build(0, layer.common())
    assert (metadata.num_decodes, metadata.num_prefills) == (1, 2)
    backend = metadata.prefill.prefill_backend
    assert isinstance(backend, prefill.MlaVar3PrefillBackend)
    latents = torch.cat([layer.rows[layer.table[i].long()].flatten(0, 1)[:n] for i, n in ((1, 150), (2, 140))])
    heads = (latents[:, :K] @ layer.kv_b.T).view(-1, H, 2 * D)
    keys = torch.cat([heads[..., :D], latents[:, None, K:].expand(-1, H, -1)], -1)
    out, lse = backend.run_prefill_new_tokens(layer.queries[1:], keys, heads[..., D:], True)
    wanted = torch.einsum("nhk,hdk->nhd", layer.expected()[1:], layer.kv_b.view(H, 2 * D, K)[:, D:].float())
    assert near(out, wanted) and lse.shape == (H, 290)
    # The context of chunks, without a mask.
    starts = metadata.prefill.query_start_loc
    if releases.release().pieces:
        piece = {"chunk": SimpleNamespace(query_start_loc=starts, cu_seq_lens=starts)}
    else:
        metadata.prefill.chunked_context = SimpleNamespace(cu_seq_lens=starts[None])
        piece = {"chunk_idx": 0}
    all_seen, more = backend.run_prefill_context_chunk(q=layer.queries[1:], k=keys, v=heads[..., D:], **piece)
    assert near(all_seen[149], out[149].float()) and near(more[:, 149], lse[:, 149])
    assert not near(all_seen, wanted)


@pytest.mark.gpu
@pytest.mark.parametrize("where", ["cuda"], indirect=True)
def test_a_graph_is_replayed_for_other_requests(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Captured for 16 requests and 128 tokens, and replayed for fewer of both."""
    impl = dense_impl("auto", monkeypatch)
    layers = [Layer(asked, config(mode="FULL"), impl) for asked in (MIXED, [(1, 64), (7, 90)])]
    captured = layers[0].common(tokens=128, requests=16, most=128)
    metadata = builder_of(layers[0], dense.MlaVar3Backend).build_for_cudagraph_capture(captured)
    rows, cache = torch.zeros(128, H, K + P).bfloat16(), layers[0].cache.clone()

    def attend() -> Any:
        return layers[0].impl.forward_mqa(rows, cache, metadata, layers[0])[0]

    attend()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = attend()
    for layer in layers:
        given = layer.common(tokens=128, requests=16, most=128)
        captured.block_table_tensor.zero_()
        captured.block_table_tensor[:, : given.block_table_tensor.shape[1]] = given.block_table_tensor
        captured.seq_lens.copy_(given.seq_lens)
        captured.query_start_loc.copy_(given.query_start_loc)
        cache[: len(layer.cache)] = layer.cache
        count = len(layer.queries)
        rows[:count] = torch.cat(layer.latent(), -1)
        graph.replay()
        assert near(out[:count], layer.expected())


@pytest.mark.parametrize("told", [False, True])
@pytest.mark.parametrize("cache", ["auto", "fp8_ds_mla"])
def test_sparse_attention_to_chosen_tokens(
    cache: str, told: bool, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    monkeypatch.setattr(sparse, "pays", lambda tokens, heads: told and (tokens, heads) == (54, H))
    requests = [(1, 70), (3, 129), (50, 50)]
    buffer = torch.full((64, 128), -1, dtype=torch.int32)
    token = 0
    for count, length in requests:
        for seen in range(length - count + 1, length + 1):  # all that it may see, up to 128
            chosen = torch.arange(seen)[-128:].int()
            buffer[token, : len(chosen)] = chosen
            token += 1
    given = {
        "num_heads": H, "head_size": K + P, "scale": (D + P) ** -0.5, "num_kv_heads": 1, "kv_cache_dtype": cache,
        "kv_lora_rank": K, "kv_b_proj": None, "alibi_slopes": None, "sliding_window": None, "logits_soft_cap": None,
        "attn_type": "decoder", "kv_sharing_target_layer_name": None, "q_lora_rank": None, "qk_nope_head_dim": D,
        "qk_rope_head_dim": P, "qk_head_dim": D + P, "v_head_dim": D,
    }  # fmt: skip
    if releases.release().sparse_init:
        from vllm.model_executor.layers.attention import sparse_mla_attention as common

        monkeypatch.setattr(common, "get_tensor_model_parallel_world_size", lambda: 1)
        given["index_group_builder"] = SimpleNamespace(register_layer=lambda *a, **k: (None, 0))
        monkeypatch.setattr(common, "get_current_vllm_config", config)
    impl = sparse.MlaVar3SparseImpl(topk_indices_buffer=buffer, **given)
    packed = functools.partial(pack, layout_of("v32"))
    layer = Layer(requests, config(cache), impl, None if cache == "auto" else packed)

    def global_indices(
        request: Any, table: Any, chosen: Any, BLOCK_SIZE: int, NUM_TOPK_TOKENS: int, return_valid_counts: bool
    ) -> Any:
        page = table[request.long()].gather(1, (chosen.clamp(min=0) // BLOCK_SIZE).long())
        slots = torch.where(chosen < 0, -1, page * BLOCK_SIZE + chosen % BLOCK_SIZE).int()
        return (slots, (slots >= 0).sum(-1).int()) if return_valid_counts else slots

    if where == "cpu":
        monkeypatch.setattr(sparse, "triton_convert_req_index_to_global_index", global_indices)
    if releases.release().counts:
        owners = torch.cat([torch.full((count,), i) for i, (count, _) in enumerate(requests)]).int()
        metadata = SimpleNamespace(req_id_per_token=owners, block_table=layer.table, block_size=PAGE)
    else:
        metadata = sparse_builder(layer, monkeypatch).build(0, layer.common())
        if told:
            buffer[:token][buffer[:token] < 0] = 3  # behind the count nothing is read
    out, lse = impl.forward_mqa(layer.latent(), layer.cache, metadata, layer)
    wanted = layer.expected(None if cache == "auto" else unpack(layout_of("v32"), layer.cache))
    # One row sees 129 tokens, of which 128 are chosen.
    assert lse is None and near(out[:3], wanted[:3]) and near(out[4:], wanted[4:])


def sparse_builder(layer: Layer, monkeypatch: pytest.MonkeyPatch) -> Any:
    from vllm.v1.attention.backends.mla import flashinfer_mla_sparse as theirs

    if torch.get_default_device().type == "cpu":  # memory is pinned where there is a GPU
        monkeypatch.setattr(theirs, "np_to_pinned_tensor", torch.from_numpy)
    return builder_of(layer, sparse.MlaVar3SparseBackend)


def test_indices_that_count_are_counted_once_a_step(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the same memory in each step, as replays of a graph read it, also where it has room for more tokens."""
    if releases.release().counts:
        pytest.skip("in this release the kernel that makes slots counts them")
    layer = Layer([(1, 70), (3, 129), (5, 5), (2, 4000)], config(), None)
    builder = sparse_builder(layer, monkeypatch)
    metadata = builder.build(0, layer.common())
    assert metadata.topk_lens.tolist() == [70, 127, 128, 128, 1, 2, 3, 4, 5, 128, 128]
    again = builder.build_for_cudagraph_capture(Layer([(1, 9)] * 4, layer.settings, None).common(tokens=8, requests=8))
    assert again.topk_lens.tolist() == [9] * 4 + [0] * 4
    assert again.topk_lens.data_ptr() == metadata.topk_lens.data_ptr() and again.topk_lens.dtype == torch.int32


def test_names_are_registered_and_go_to_other_processes() -> None:
    from vllm.v1.attention.backends.mla.prefill.registry import MLAPrefillBackendEnum
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    plug_in.register()
    plug_in.register()
    assert AttentionBackendEnum["MLA_VAR3"].get_class() is dense.MlaVar3Backend
    assert AttentionBackendEnum["MLA_VAR3_SPARSE"].get_class() is sparse.MlaVar3SparseBackend
    assert MLAPrefillBackendEnum["MLA_VAR3"].get_class() is prefill.MlaVar3PrefillBackend
    for member in (
        AttentionBackendEnum["MLA_VAR3"],
        AttentionBackendEnum.TRITON_MLA,
        MLAPrefillBackendEnum["MLA_VAR3"],
    ):
        data = pickle.dumps(member)
        code = f"import pickle; print(pickle.loads({data!r}).name)"
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
        assert done.stdout.strip().endswith(member.name), done.stderr


def test_what_is_not_served_is_said(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    from vllm.platforms.interface import DeviceCapability

    monkeypatch.setattr(told.registry, "missing", lambda language: None)
    told.missing.cache_clear()
    monkeypatch.setattr(dense, "get_current_vllm_config", lambda: config("fp8"))
    assert not dense.MlaVar3Backend.supports_device_cpu_query_lens_mismatch()
    asked = {
        "head_size": 576, "dtype": torch.bfloat16, "kv_cache_dtype": "auto", "block_size": 64, "use_mla": True,
        "has_sink": False, "use_sparse": False, "use_mm_prefix": False, "use_per_head_quant_scales": False,
        "attn_type": "decoder", "device_capability": DeviceCapability(9, 0),
    }  # fmt: skip
    ask = dense.MlaVar3Backend.validate_configuration
    assert ask(**asked) == []
    of_sparse = {**asked, "use_sparse": True}
    attention = SimpleNamespace(hisparse_config=None)
    monkeypatch.setattr(sparse, "get_current_vllm_config", lambda: SimpleNamespace(attention_config=attention))
    assert sparse.MlaVar3SparseBackend.validate_configuration(**of_sparse) == []
    attention.hisparse_config = "some"
    (reason,) = sparse.MlaVar3SparseBackend.validate_configuration(**of_sparse)
    assert reason.endswith("a part of this one is on the host")
    assert ask(**{**asked, "device_capability": DeviceCapability(10, 0)}) == ["compute capability not supported"]
    assert "kv_cache_dtype not supported" in ask(**{**asked, "kv_cache_dtype": "fp8_e5m2"})
    (reason,) = ask(**{**asked, "kv_cache_dtype": "fp8", "head_size": 320})
    assert reason.startswith("MLA_VAR3 reads FP8 caches of 576 columns")
    monkeypatch.setattr(releases, "add_backends", lambda *names: 1 / 0)
    plug_in.register()
    assert "The backends of mla_var3 are not available: ZeroDivisionError" in caplog.text
