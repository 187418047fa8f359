"""What the backend `dsa` calls FlashMLA for, over caches of 656 bytes a token: `sparse_mla_decode`."""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.layers.attention.dsa_backend import DeepseekSparseAttnBackend

from mla_var3.catalogue import registry
from mla_var3.engines.told import say
from mla_var3.ops.sparse import sparse_mla_decode
from mla_var3.packed_cache import layout_of


class MlaVar3SparseBackend(DeepseekSparseAttnBackend):
    """SGLang's own with another kernel for the choice `flashmla_kv`."""

    def _forward_flashmla_kv(
        self, q_all: Any, kv_cache: Any, v_head_dim: int, sm_scale: float, layer: Any, metadata: Any, page_table_1: Any
    ) -> torch.Tensor:
        """(tokens, 1, h, 512) of query tokens with a row of slots each."""
        served = self.dsa_kv_cache_store_fp8 and self.kv_cache_dim == layout_of("v32").token_bytes
        if not served or registry.missing("cute-dsl"):
            return super()._forward_flashmla_kv(
                q_all, kv_cache, v_head_dim, sm_scale, layer, metadata, page_table_1=page_table_1
            )
        say("sglang.mla_var3", "dsa with flashmla_kv", layer.tp_q_head_num, "of 656 bytes a token")
        rows = q_all.view(-1, 1, layer.tp_q_head_num, layer.head_dim)
        pages = kv_cache.view(torch.uint8).view(-1, self.physical_page_size, self.kv_cache_dim)
        out = sparse_mla_decode(rows, pages, page_table_1.unsqueeze(1), layout="v32", scale=sm_scale)
        assert isinstance(out, torch.Tensor)
        return out
