"""`MLA_VAR3_SPARSE`: attention to the tokens that an indexer chose, of DeepSeek V3.2 and GLM-5.

Every query token is a request of its own with a row of indices, whether it decodes or belongs to a prompt. Full CUDA
graphs are declared for batches whose requests have equally many query tokens (`UNIFORM_BATCH`). Caches are in bfloat16,
or packed with 656 bytes a token (`fp8_ds_mla`).

A query token whose context is shorter than its row names all of it in front, and -1 behind. In large steps
(`counts.pays`) the kernel is given how many indices count, so that it deals out what is there. Where vLLM's own kernel
counts them beside making slots of them, that number is taken. Elsewhere it is the context, computed once a step from
what the indexer computes it from, in memory that replays of a graph read again.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from vllm.config import get_current_vllm_config
from vllm.v1.attention.backend import AttentionBackend, AttentionCGSupport
from vllm.v1.attention.backends.mla.flashinfer_mla_sparse import FlashInferMLASparseMetadataBuilder
from vllm.v1.attention.backends.mla.sparse_utils import triton_convert_req_index_to_global_index

from mla_var3.engines.counts import pays
from mla_var3.engines.told import missing, say
from mla_var3.engines.vllm.releases import base_of_sparse, init_sparse, release
from mla_var3.ops.sparse import sparse_mla_decode
from mla_var3.packed_cache import layout_of

PACKED = "fp8_ds_mla"


class MlaVar3SparseBackend(AttentionBackend):
    """What vLLM asks before it takes the backend for a model."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.bfloat16]
    supported_kv_cache_dtypes: ClassVar[list[Any]] = ["auto", "bfloat16", PACKED]

    @staticmethod
    def get_name() -> str:
        return "MLA_VAR3_SPARSE"

    @staticmethod
    def get_impl_cls() -> type[MlaVar3SparseImpl]:
        return MlaVar3SparseImpl

    @staticmethod
    def get_builder_cls() -> type[MlaVar3SparseMetadataBuilder]:
        return MlaVar3SparseMetadataBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[Any]:
        return [64]

    @staticmethod
    def get_kv_cache_shape(
        num_blocks: int, block_size: int, num_kv_heads: int, head_size: int, cache_dtype_str: str = "auto"
    ) -> tuple[int, ...]:
        columns = layout_of("v32").token_bytes if cache_dtype_str == PACKED else head_size
        return (num_blocks, block_size, columns)

    @classmethod
    def get_supported_head_sizes(cls) -> list[int]:
        return [576]

    @classmethod
    def is_mla(cls) -> bool:
        return True

    @classmethod
    def is_sparse(cls) -> bool:
        return True

    @classmethod
    def supports_compute_capability(cls, capability: Any) -> bool:
        return bool(capability.major == 9)

    @classmethod
    def supports_combination(
        cls, head_size: int, dtype: torch.dtype, kv_cache_dtype: Any, block_size: int | None, use_mla: bool,
        has_sink: bool, use_sparse: bool, use_mm_prefix: bool, device_capability: Any,
    ) -> str | None:  # fmt: skip
        if getattr(get_current_vllm_config().attention_config, "hisparse_config", None) is not None:
            return "MLA_VAR3_SPARSE reads caches on the GPU, and a part of this one is on the host"
        return missing("vllm.mla_var3", "MLA_VAR3_SPARSE")


class MlaVar3SparseMetadataBuilder(FlashInferMLASparseMetadataBuilder):
    """vLLM's own, which says of each query token whose it is, and in `topk_lens` how many of its indices count where
    nothing else counts them."""

    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.UNIFORM_BATCH

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        most = len(self.req_id_per_token_buffer)
        self._ordinals = torch.arange(1, most + 1, dtype=torch.int32, device=device)
        self._topk_lens = torch.zeros(most, dtype=torch.int32, device=device)

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> Any:
        metadata = super().build(common_prefix_len, common_attn_metadata, fast_build)
        if not release().counts:
            metadata.topk_lens = lens = self._topk_lens[: metadata.num_actual_tokens]
            tokens = int(common_attn_metadata.query_start_loc_cpu[-1])  # a graph may have room for more
            # Tokens that query token t of a request sees: all of it, less those of its query tokens behind t.
            before = metadata.seq_lens - metadata.query_start_loc[1:]
            seen = torch.index_select(before, 0, metadata.req_id_per_token[:tokens], out=lens[:tokens])
            seen.add_(self._ordinals[:tokens]).clamp_(0, self.topk_tokens)
            lens[tokens:].zero_()
        return metadata


class MlaVar3SparseImpl(base_of_sparse()):  # type: ignore[misc]
    """The calls of a layer."""

    is_sparse = True
    supports_pcp: bool = False

    def __init__(self, topk_indices_buffer: torch.Tensor | None = None, indexer: Any = None, **given: Any) -> None:
        init_sparse(self, super().__init__, given, indexer, topk_indices_buffer)
        self.supports_quant_query_input = False
        say("vllm.mla_var3", "MLA_VAR3_SPARSE", self.num_heads, self.kv_cache_dtype)

    def forward_mqa(
        self, q: Any, kv_c_and_k_pe_cache: torch.Tensor, attn_metadata: Any, layer: Any
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """As of the dense backend."""
        rows = torch.cat(q, dim=-1) if isinstance(q, tuple) else q
        tokens = len(rows)
        chosen, told = self.topk_indices_buffer[:tokens], pays(tokens, self.num_heads)
        counts = told and release().counts
        slots = triton_convert_req_index_to_global_index(
            attn_metadata.req_id_per_token[:tokens], attn_metadata.block_table, chosen,
            BLOCK_SIZE=attn_metadata.block_size, NUM_TOPK_TOKENS=chosen.shape[1], return_valid_counts=counts,
        )  # fmt: skip
        slots, lens = slots if counts else (slots, attn_metadata.topk_lens[:tokens] if told else None)
        out = sparse_mla_decode(
            rows.unsqueeze(1), kv_c_and_k_pe_cache, slots.unsqueeze(1), topk_lens=lens, scale=self.scale,
            layout="v32" if self.kv_cache_dtype == PACKED else "bf16",
        )  # fmt: skip
        assert isinstance(out, torch.Tensor)
        return out.squeeze(1), None
