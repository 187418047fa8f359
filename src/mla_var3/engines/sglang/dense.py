"""`mla_var3`: decode of dense MLA, where one token or several drafted ones of each request are attended to in latent
space. Page tables, caches and prompts are those of SGLang's FlashMLA backend.
"""

from __future__ import annotations

import logging
from typing import Any

import torch
from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS
from sglang.srt.layers.attention.flashmla_backend import PAGE_SIZE, FlashMLABackend
from sglang.srt.mem_cache.layout.paged_view import paged_view
from sglang.srt.mem_cache.memory_pool import KVWriteLoc
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.runtime_context import get_parallel
from sglang.srt.utils import get_device_capability

from mla_var3.catalogue import registry
from mla_var3.engines.told import say
from mla_var3.ops.decode import mla_decode
from mla_var3.ops.sparse import packed_mla_decode

_logger = logging.getLogger("sglang.mla_var3")


def create(runner: Any) -> Any:
    """The backend of a model; SGLang's own for MLA, with one line of why, of a model that it does not serve."""
    reason = why_not(runner)
    if reason is not None:
        _logger.warning(
            "mla_var3 does not serve this model: %s. FlashInfer does in its place.", reason.removesuffix(".")
        )
        return ATTENTION_BACKENDS["flashinfer"](runner)
    return MlaVar3Backend(runner)


def why_not(runner: Any) -> str | None:
    """Why a model is not served; None where it is."""
    if not runner.use_mla_backend:
        return "it has no MLA"
    if get_device_capability()[0] != 9:
        return "the GPU is none of Hopper's"
    if runner.page_size % PAGE_SIZE:
        return f"a page has {runner.page_size} tokens, and --page-size {PAGE_SIZE} is needed"
    if runner.kv_cache_dtype == torch.float8_e5m2:
        return "the cache is in float8_e5m2"
    if get_parallel().dcp_enabled:
        return "the context is on several devices"
    return registry.missing("cute-dsl")


class MlaVar3Backend(FlashMLABackend):
    """FlashMLA's backend with other kernels."""

    def __init__(self, model_runner: Any, *args: Any, **options: Any) -> None:
        super().__init__(model_runner, *args, **options)
        say("sglang.mla_var3", "mla_var3", self.num_local_heads, str(model_runner.kv_cache_dtype))

    def forward_decode(
        self, q: Any, k: Any, v: Any, layer: Any, forward_batch: Any, save_kv_cache: bool = True
    ) -> torch.Tensor:
        """(tokens, h · k) of one query token a request."""
        return _attended(self, q, k, v, layer, forward_batch, save_kv_cache, forward_batch.seq_lens.to(torch.int32))

    def forward_extend(
        self, q: Any, k: Any, v: Any, layer: Any, forward_batch: Any, save_kv_cache: bool = True, **options: Any
    ) -> torch.Tensor:
        """As above of drafted tokens, equally many of each request; prompts go to the base."""
        mode = forward_batch.forward_mode
        if mode == ForwardMode.EXTEND or not (mode.is_target_verify() or mode.is_draft_extend_v2()):
            return super().forward_extend(q, k, v, layer, forward_batch, save_kv_cache, **options)
        if mode.is_draft_extend_v2():
            lengths = self.forward_metadata.seq_lens_k
        else:
            lengths = forward_batch.seq_lens.to(torch.int32) + self.num_draft_tokens
        return _attended(self, q, k, v, layer, forward_batch, save_kv_cache, lengths)


def _attended(
    backend: MlaVar3Backend, q: Any, k: Any, v: Any, layer: Any, forward_batch: Any, save: bool, lengths: torch.Tensor
) -> torch.Tensor:
    """(tokens, h · k) of queries in latent space (tokens, h · (k + p)), equally many of each request. save: whether new
    tokens are written into the cache first."""
    if k is not None and save:
        backend.token_to_kv_pool.set_kv_buffer(layer, KVWriteLoc.for_batch(forward_batch), k, v)
    requests = forward_batch.batch_size
    rows = q.view(requests, -1, layer.tp_q_head_num, layer.head_dim)
    cache = paged_view(backend.token_to_kv_pool.get_key_buffer(layer.layer_id), PAGE_SIZE)
    table = backend.forward_metadata.block_kv_indices[:requests]
    if not table.is_contiguous():  # the first columns of a wider table: all of it, so that shapes are the same
        table = table.as_strided((requests, table.stride(0)), table.stride())
    if backend.is_fp8_kvcache:
        scale = layer.k_scale
        out = packed_mla_decode(
            rows.to(torch.bfloat16), cache, table, lengths, layout="flat", scale=layer.scaling,
            cache_scale=rows.new_ones(1, dtype=torch.float32) if scale is None else scale.reshape(1),
        )  # fmt: skip
    else:
        out = mla_decode(rows, cache, table, lengths, scale=layer.scaling, causal=True, head_dim_v=backend.kv_lora_rank)
    assert isinstance(out, torch.Tensor)
    return out.view(-1, layer.tp_q_head_num * layer.v_head_dim)
