"""What the backend `dsa` calls FlashMLA for, over caches of 656 bytes a token: `sparse_mla_decode`."""

from __future__ import annotations

import functools
import logging
from typing import Any

import torch
from sglang.srt.layers.attention.dsa_backend import DeepseekSparseAttnBackend
from sglang.srt.utils import get_device_capability

from mla_var3.catalogue import registry
from mla_var3.engines.counts import pays
from mla_var3.engines.told import say
from mla_var3.ops.sparse import sparse_mla_decode
from mla_var3.packed_cache import layout_of

_logger = logging.getLogger("sglang.mla_var3")


class MlaVar3SparseBackend(DeepseekSparseAttnBackend):
    """SGLang's own with another kernel for the choice `flashmla_kv`."""

    def _forward_flashmla_kv(
        self, q_all: Any, kv_cache: Any, v_head_dim: int, sm_scale: float, layer: Any, metadata: Any, page_table_1: Any
    ) -> torch.Tensor:
        """(tokens, 1, h, 512) of query tokens with a row of slots each; SGLang's own kernel, with one line of why, of a
        cache or on a device that ours is not for."""
        if not _serves(self):
            return super()._forward_flashmla_kv(
                q_all, kv_cache, v_head_dim, sm_scale, layer, metadata, page_table_1=page_table_1
            )
        say("sglang.mla_var3", "dsa with flashmla_kv", layer.tp_q_head_num, "of 656 bytes a token")
        rows = q_all.view(-1, 1, layer.tp_q_head_num, layer.head_dim)
        pages = kv_cache.view(torch.uint8).view(-1, self.physical_page_size, self.kv_cache_dim)
        lens = topk_lens(self, metadata, len(rows)) if pays(len(rows), layer.tp_q_head_num) else None
        out = sparse_mla_decode(rows, pages, page_table_1.unsqueeze(1), topk_lens=lens, layout="v32", scale=sm_scale)
        assert isinstance(out, torch.Tensor)
        return out


def topk_lens(backend: Any, metadata: Any, rows: int) -> torch.Tensor | None:
    """How many slots of each query token count, which SGLang computes once a step and gives its own sparse kernels too;
    None where it has no number for each, or where the slots that count need not come first: chosen by FlashInfer's
    top-k without a page table, in pools of tokens, or from a cache of which a part is on the host."""
    lens = metadata.dsa_cache_seqlens_int32
    unordered = backend.dsa_topk_backend.is_flashinfer() and not backend.use_fused_topk
    if len(lens) != rows or unordered or backend.dsa_index_kpool > 1 or backend.hisparse_coordinator is not None:
        return None
    assert isinstance(lens, torch.Tensor)
    return lens


def why_not(backend: Any) -> str | None:
    """Why calls are left to SGLang's own kernel; None where they are not."""
    if get_device_capability()[0] != 9:
        return "the GPU is none of Hopper's"
    packed = layout_of("v32").token_bytes
    if not backend.dsa_kv_cache_store_fp8:
        return f"the cache is not one of {packed} bytes a token, which --kv-cache-dtype fp8_e4m3 makes"
    if backend.kv_cache_dim != packed:
        return f"the cache has {backend.kv_cache_dim} bytes a token, and not {packed}"
    return registry.missing("cute-dsl")


@functools.cache
def _serves(backend: Any) -> bool:
    """Whether calls of a backend are computed here, which no call changes; one line of why where they are not."""
    reason = why_not(backend)
    if reason is not None:
        _logger.warning(
            "mla_var3 does not compute what dsa calls FlashMLA for: %s. SGLang's own kernel does.",
            reason.removesuffix("."),
        )
    return reason is None
