"""`MLA_VAR3`: the attention backend of dense MLA.

Decode, and every short chunk of a prompt, is attended to in latent space by one call of `mla_decode`. Its requests may
differ in their query tokens, since a scheduler on the device deals out what it finds, so a full CUDA graph may hold any
batch; with FP8, or with the context on several devices, one whose requests have equally many. Longer chunks and prompts
go the way that they go in all backends of vLLM: over decompressed heads, by a prefill backend. Caches are in the
model's dtype, or in e4m3 with one scale (`packed_mla_decode`), where the requests of a call have equally many query
tokens.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from vllm.config import get_current_vllm_config
from vllm.model_executor.layers.attention.mla_attention import (
    MLACommonBackend,
    MLACommonImpl,
    MLACommonMetadata,
    MLACommonMetadataBuilder,
    QueryLenSupport,
)
from vllm.v1.attention.backend import AttentionCGSupport

from mla_var3.engines.told import missing, say
from mla_var3.engines.vllm.releases import keeps_counts
from mla_var3.ops.decode import mla_decode
from mla_var3.ops.sparse import packed_mla_decode

#: Query tokens of a request up to which it is attended to in latent space, as vLLM's FLASHMLA has it.
MOST_ABSORBED = 128
FP8 = ("fp8", "fp8_e4m3")


class MlaVar3Backend(MLACommonBackend):
    """What vLLM asks before it takes the backend for a model."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.bfloat16, torch.float16]
    supported_kv_cache_dtypes: ClassVar[list[Any]] = ["auto", "bfloat16", "float16", *FP8]

    @staticmethod
    def get_name() -> str:
        return "MLA_VAR3"

    @staticmethod
    def get_impl_cls() -> type[MlaVar3Impl]:
        return MlaVar3Impl

    @staticmethod
    def get_builder_cls() -> type[MlaVar3MetadataBuilder]:
        return MlaVar3MetadataBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[Any]:
        return [64]  # of any size, but bundles are made for these

    @staticmethod
    def get_kv_cache_stride_order(include_num_layers_dimension: bool = False) -> tuple[int, ...]:
        # Kernels read pages that lie apart, so the pages of all layers may lie beside each other.
        return (1, 0, 2, 3) if include_num_layers_dimension else (0, 1, 2)

    @classmethod
    def supports_compute_capability(cls, capability: Any) -> bool:
        return bool(capability.major == 9)

    @classmethod
    def supports_combination(
        cls, head_size: int, dtype: torch.dtype, kv_cache_dtype: Any, block_size: int | None, use_mla: bool,
        has_sink: bool, use_sparse: bool, use_mm_prefix: bool, device_capability: Any,
    ) -> str | None:  # fmt: skip
        if kv_cache_dtype in FP8 and (head_size != 576 or dtype != torch.bfloat16):
            return f"MLA_VAR3 reads FP8 caches of 576 columns with queries in bfloat16, not {head_size} and {dtype}"
        return missing("vllm.mla_var3", "MLA_VAR3")

    @classmethod
    def supports_device_cpu_query_lens_mismatch(cls) -> bool:
        return get_current_vllm_config().cache_config.cache_dtype not in FP8


class MlaVar3MetadataBuilder(MLACommonMetadataBuilder[MLACommonMetadata]):
    """Which requests of a step are attended to in latent space."""

    query_len_support = QueryLenSupport.VARLEN
    reorder_batch_threshold: int = MOST_ABSORBED

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        if vllm_config.cache_config.cache_dtype in FP8:
            # The base adds speculative tokens to it.
            self.query_len_support, self.reorder_batch_threshold = QueryLenSupport.UNIFORM, 1
        elif vllm_config.compilation_config.cudagraph_mode.mixed_mode().has_full_cudagraphs():
            # Full graphs of any batch: it holds no prefill, so every chunk that fits into a graph is in latent space.
            most = vllm_config.compilation_config.max_cudagraph_capture_size or 0
            self.reorder_batch_threshold = max(MOST_ABSORBED, most)
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)

    @classmethod
    def get_cudagraph_support(cls, vllm_config: Any, kv_cache_spec: Any) -> AttentionCGSupport:
        one_length = vllm_config.cache_config.cache_dtype in FP8
        # Of a context on several devices vLLM takes requests of one query token for decodes alone.
        if one_length or vllm_config.parallel_config.decode_context_parallel_size > 1:
            return AttentionCGSupport.UNIFORM_BATCH
        return AttentionCGSupport.ALWAYS


class MlaVar3Impl(MLACommonImpl[MLACommonMetadata]):
    """The calls of a layer."""

    can_return_lse_for_decode: bool = True
    supports_dcp: bool = True
    supports_pcp: bool = False

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.supports_quant_query_input = False  # queries stay in the model's dtype beside FP8 caches
        self._keeps_counts = keeps_counts(get_current_vllm_config())
        say("vllm.mla_var3", "MLA_VAR3", self.num_heads, self.kv_cache_dtype)

    def forward_mqa(
        self, q: Any, kv_c_and_k_pe_cache: torch.Tensor, attn_metadata: Any, layer: Any
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Of query tokens in latent space, (tokens, h, k) and (tokens, h, p) or both in one: out (tokens, h, k), and
        LSE (tokens, h) where the context is on several devices."""
        rows = torch.cat(q, dim=-1) if isinstance(q, tuple) else q
        decode, requests, most = attn_metadata.decode, attn_metadata.num_decodes, attn_metadata.max_query_len
        given = kv_c_and_k_pe_cache, decode.block_table, decode.seq_lens
        wants_lse = self.need_to_return_lse_for_decode
        # Requests of equally many query tokens are a call of their own, which is faster. One request alone may have
        # fewer than the graph that it is computed by.
        one = len(rows) == requests and (most == 1 or attn_metadata.num_prefills > 0)
        even = one or (self._keeps_counts and len(rows) == requests * most and requests > 1)
        if self.kv_cache_dtype in FP8:
            made = packed_mla_decode(
                rows.view(requests, -1, *rows.shape[1:]), *given, layout="flat", scale=self.scale,
                cache_scale=layer._k_scale.reshape(1), return_lse=wants_lse,
            )  # fmt: skip
        elif even:
            made = mla_decode(
                rows.view(requests, -1, *rows.shape[1:]), *given, scale=self.scale, causal=True,
                head_dim_v=self.kv_lora_rank, return_lse=wants_lse,
            )  # fmt: skip
        else:
            made = mla_decode(
                rows, *given, scale=self.scale, causal=True, head_dim_v=self.kv_lora_rank, return_lse=wants_lse,
                cu_seqlens_q=attn_metadata.query_start_loc[: requests + 1],
            )  # fmt: skip
        out, lse = made if isinstance(made, tuple) else (made, None)
        if lse is not None and lse.dim() == 3:
            lse = lse.transpose(1, 2).flatten(0, 1)
        return out.view(len(rows), *out.shape[-2:]), lse
