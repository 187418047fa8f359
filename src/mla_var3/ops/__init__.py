"""What a serving engine calls: the fastest version for its shapes, as one function.

    from mla_var3.ops import mla_decode
    out = mla_decode(q, kv_cache, page_table, seq_lens, causal=True)

`mla_prefill` attends from prompts and chunks of prompts over decompressed heads; `flash_attn_varlen_func` is it with
flash_attn's arguments. `packed_mla_decode` decodes over packed caches, and `sparse_mla_decode` attends to the tokens of
one that indices name; `indexer_logits`, `topk_indices` and `indexer_topk` choose these tokens, and `index_append`
caches their keys, or `indexed_append` together with what attention caches. `rmsnorm`, `rope_append`, `latent_append`
and `absorb_gemm` are the kernels around them. `mla_var3.ops.flash_mla` has attention under FlashMLA's names, and
`mla_var3.ops.deep_gemm` the indexer's logits under DeepGEMM's. docs/serving.md says how to use them.
"""

from __future__ import annotations

from mla_var3.ops.chunk_prefill import mla_chunk_prefill
from mla_var3.ops.context_parallel import merge_partials, mla_decode_cp
from mla_var3.ops.decode import compile_for, mla_decode, use_bundle
from mla_var3.ops.engine import DecodeSchedule
from mla_var3.ops.indexed import indexed_append
from mla_var3.ops.indexer import index_append, indexer_logits, indexer_topk, topk_indices
from mla_var3.ops.layer import absorb_gemm, latent_append, rmsnorm, rope_append
from mla_var3.ops.library import register_with_torch
from mla_var3.ops.prefill import flash_attn_varlen_func, mla_prefill
from mla_var3.ops.sparse import packed_mla_decode, sparse_mla_decode

__all__ = [
    "DecodeSchedule",
    "absorb_gemm",
    "compile_for",
    "flash_attn_varlen_func",
    "index_append",
    "indexed_append",
    "indexer_logits",
    "indexer_topk",
    "latent_append",
    "merge_partials",
    "mla_chunk_prefill",
    "mla_decode",
    "mla_decode_cp",
    "mla_prefill",
    "packed_mla_decode",
    "rmsnorm",
    "rope_append",
    "sparse_mla_decode",
    "topk_indices",
    "use_bundle",
]

register_with_torch()
