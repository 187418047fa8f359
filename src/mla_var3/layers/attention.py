"""`MlaAttention`: the attention of DeepSeek V2 and V3 and of Kimi K2 over a paged latent cache.

    hidden (tokens, hidden) → q_a_proj → norm → q_b_proj → q: d columns without rope, p with
                            → kv_a_proj_with_mqa → latent → norm ┐
                                                 → rope → rotate ┴→ pages[slots]
    decode    absorbed:      [q · W_UK | q_rope] over the cached rows, then · W_UV; on a GPU by `rmsnorm`,
                             `absorb_gemm`, `rope_append` and `mla_decode` of `mla_var3.ops`
    prefill   decompressed:  [latent · W_UKᵀ | rope] and latent · W_UVᵀ of every head, then attention of torch
    → o_proj → (tokens, hidden)

Both are the same function (DeepSeek-V2, arXiv 2405.04434, section 2.1). Absorbed attention reads each cached row once
for all heads, which decode wants; decompressed heads take about a third of its multiplications, which prefill wants.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.functional import linear, scaled_dot_product_attention

from mla_var3.errors import UserError
from mla_var3.layers.cache import PAGE
from mla_var3.layers.checkpoint import judge_names, prepare
from mla_var3.layers.config import read_config
from mla_var3.layers.rope import Rope, softmax_scale
from mla_var3.ops import absorb_gemm, mla_decode, rmsnorm, rope_append

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from mla_var3.layers.cache import Step

#: transformers' modules and DeepSeek's have this whatever `rms_norm_eps` of the config is.
NORM_EPS = 1e-6


class MlaAttention(nn.Module):
    """One layer, built from a model's Hugging Face config, whose parameters have the names of transformers'
    `DeepseekV3Attention` and `DeepseekV2Attention`, so that it loads their state dicts; those of block-FP8 checkpoints
    (`weight_scale_inv`) are dequantised while they are loaded. For inference: no gradients.

    `LatentCache` and `Step` say where tokens lie. `columns` is the width that the cache needs.
    """

    def __init__(
        self, config: Any, *, dtype: torch.dtype | None = None, device: torch.device | str | None = None
    ) -> None:
        """config: transformers' DeepseekV3Config, DeepseekV2Config, or Kimi K2's. Raises `UserError` for others."""
        super().__init__()
        self.shape = shape = read_config(config)
        self.rope = Rope(shape)
        self.scale = softmax_scale(shape)
        self.columns = shape.k + shape.p
        place: dict[str, Any] = {"dtype": dtype, "device": device}
        queries = shape.h * (shape.d + shape.p)
        if shape.q_rank is None:
            self.q_proj = nn.Linear(shape.hidden, queries, bias=False, **place)
        else:
            self.q_a_proj = nn.Linear(shape.hidden, shape.q_rank, bias=shape.bias, **place)
            self.q_a_layernorm = nn.RMSNorm(shape.q_rank, NORM_EPS, **place)
            self.q_b_proj = nn.Linear(shape.q_rank, queries, bias=False, **place)
        self.kv_a_proj_with_mqa = nn.Linear(shape.hidden, self.columns, bias=shape.bias, **place)
        self.kv_a_layernorm = nn.RMSNorm(shape.k, NORM_EPS, **place)
        self.kv_b_proj = nn.Linear(shape.k, shape.h * (shape.d + shape.v), bias=False, **place)
        self.o_proj = nn.Linear(shape.h * shape.v, shape.hidden, bias=shape.bias, **place)
        self.register_load_state_dict_pre_hook(_prepare)

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """torch's, which raises `UserError` in one sentence where names or shapes do not fit. As a part of a larger
        module the layer is loaded by that module's; FP8 weights are dequantised then as well."""
        if strict:
            judge_names(state_dict, self.state_dict())
        return super().load_state_dict(state_dict, strict, assign)

    @torch.no_grad()
    def forward(self, hidden: torch.Tensor, pages: torch.Tensor, step: Step) -> torch.Tensor:
        """Writes the new tokens of a step into the cache, and attends from each to its request's tokens up to itself.

        hidden: (tokens, hidden), the requests' new tokens one behind another. pages: (num_pages, 64, columns), this
        layer's part of `LatentCache.pages`, in hidden's dtype. Returns (tokens, hidden).

        Where every request has one new token, a GPU computes by the functions of `mla_var3.ops` (bf16, fp16; values as
        wide as keys, no position past the config's longest), and can be captured in a CUDA graph once such a step has
        been made: replays read what then lies in hidden and in the step's tensors. A CPU computes by torch. Any other
        step decompresses all of each request, one after another: give prompts steps of their own.
        """
        shape = self.shape
        tokens = len(step.positions)
        if tuple(hidden.shape) != (tokens, shape.hidden):
            raise UserError(
                f"hidden is {tuple(hidden.shape)} and the step has {tokens} tokens of {shape.hidden} columns."
            )
        if tuple(pages.shape[1:]) != (PAGE, self.columns) or pages.dtype != hidden.dtype:
            wanted = f"(num_pages, {PAGE}, {self.columns}) in hidden's {hidden.dtype}"
            raise UserError(f"pages are {tuple(pages.shape)} {pages.dtype}: this layer needs {wanted}.")
        if step.decode and hidden.is_cuda and shape.d == shape.v:
            return self._by_kernels(hidden, pages, step)
        angles = self.rope.angles(step.positions)
        if shape.q_rank is None:
            q = self.q_proj(hidden)
        else:
            q = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(hidden)))
        q_nope, q_rope = q.view(tokens, shape.h, -1).split([shape.d, shape.p], -1)
        q_rope = self.rope.rotate(q_rope, angles)
        latent, rope = self.kv_a_proj_with_mqa(hidden).split([shape.k, shape.p], -1)
        rows = torch.cat([self.kv_a_layernorm(latent), self.rope.rotate(rope[:, None], angles)[:, 0]], -1)
        pages.view(-1, self.columns).index_copy_(0, step.slots, rows)
        attend = self._absorbed if step.decode else self._decompressed
        return self.o_proj(attend(q_nope, q_rope, pages, step).flatten(1))

    def _by_kernels(self, hidden: torch.Tensor, pages: torch.Tensor, step: Step) -> torch.Tensor:
        """A decode step without a copy: each kernel writes its columns of what the next one reads."""
        shape, kv_b = self.shape, self.kv_b_proj.weight
        if max(step.lengths) > shape.max_positions:
            raise UserError(
                f"a request has {max(step.lengths)} tokens: the model of this config is made for {shape.max_positions}."
            )
        if shape.q_rank is None:
            q, latents = self.q_proj(hidden), self.kv_a_proj_with_mqa(hidden)
            latent = rmsnorm(latents[:, : shape.k], self.kv_a_layernorm.weight, eps=NORM_EPS)
        else:
            latents = self._down(hidden)
            query, latent = rmsnorm(
                latents[:, : shape.q_rank + shape.k], self.q_a_layernorm.weight, eps=NORM_EPS,
                second_weight=self.kv_a_layernorm.weight,
            )  # fmt: skip
            q = self.q_b_proj(query)
        q = q.view(len(hidden), shape.h, shape.d + shape.p)
        queries = q.new_empty((len(hidden), shape.h, self.columns))
        absorb_gemm(q[..., : shape.d], kv_b, "q", out=queries[..., : shape.k])
        assert isinstance(latent, torch.Tensor)
        rope_append(
            q, latent, latents[:, -shape.p :], step.positions, step.slots, self.rope.table(hidden.device), queries,
            pages, interleaved=shape.interleaved,
        )  # fmt: skip
        attended = mla_decode(
            queries[:, None], pages, step.page_table, step.seq_lens, scale=self.scale, head_dim_v=shape.k
        )
        assert isinstance(attended, torch.Tensor)
        return self.o_proj(absorb_gemm(attended[:, 0], kv_b, "out").flatten(1))

    def _down(self, hidden: torch.Tensor) -> torch.Tensor:
        """(tokens, q_rank + k + p): both down-projections, as one product."""
        parts = (self.q_a_proj, self.kv_a_proj_with_mqa)
        if torch.compiler.is_compiling():  # which knows no addresses
            return torch.cat([part(hidden) for part in parts], 1)
        bias = joined([part.bias for part in parts]) if self.shape.bias else None
        return linear(hidden, joined([part.weight for part in parts]), bias)

    def _absorbed(self, q_nope: torch.Tensor, q_rope: torch.Tensor, pages: torch.Tensor, step: Step) -> torch.Tensor:
        """(b, h, v) of one token (b, h, d), (b, h, p) of each request."""
        w_uk, w_uv = self.kv_b_proj.weight.view(self.shape.h, -1, self.shape.k).split([self.shape.d, self.shape.v], 1)
        q = torch.cat([torch.einsum("bhd,hdk->bhk", q_nope, w_uk), q_rope], -1)
        if q.is_cuda:  # values of another width than keys: no kernel has the product with W_UV
            table, k = step.page_table, self.shape.k
            decoded = mla_decode(q[:, None], pages, table, step.seq_lens, scale=self.scale, head_dim_v=k)
            assert isinstance(decoded, torch.Tensor)
            out = decoded[:, 0]
        else:
            out = decode_on_cpu(q, pages, step, self.shape.k, self.scale)
        return torch.einsum("bhk,hvk->bhv", out, w_uv)

    def _decompressed(
        self, q_nope: torch.Tensor, q_rope: torch.Tensor, pages: torch.Tensor, step: Step
    ) -> torch.Tensor:
        """(tokens, h, v) of new tokens (tokens, h, d), (tokens, h, p), so many of each request."""
        shape = self.shape
        out = []
        for i, new in enumerate(torch.cat([q_nope, q_rope], -1).split(step.counts)):
            rows = cached_rows(pages, step, i)
            kv = self.kv_b_proj(rows[:, : shape.k]).view(len(rows), shape.h, -1)
            k_nope, values = kv.split([shape.d, shape.v], -1)
            keys = torch.cat([k_nope, rows[:, None, shape.k :].expand(-1, shape.h, -1)], -1)
            q, k, v = (x.transpose(0, 1)[None] for x in (new, keys, values))  # (1, h, tokens, columns)
            if len(new) == len(rows):
                attended = scaled_dot_product_attention(q, k, v, is_causal=True, scale=self.scale)
            else:  # torch's causal mask lets the first query see the first key; here the last one sees the last
                seen = torch.ones(len(new), len(rows), dtype=torch.bool, device=q.device).tril(len(rows) - len(new))
                attended = scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=self.scale)
            out.append(attended[0].transpose(0, 1))
        return torch.cat(out)


def joined(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """All rows of these tensors, (rows, ...), as one tensor. Where they do not lie behind one another, they are moved
    so that they do, and stay views of one memory: a layer's weights are in its first step on a GPU, or once they were
    replaced."""
    first = parts[0]
    end = first.data_ptr()
    for part in parts:
        if part.data_ptr() != end or part.untyped_storage().data_ptr() != first.untyped_storage().data_ptr():
            break
        end += part.numel() * part.element_size()
    else:
        rows = sum(len(part) for part in parts)
        return first.detach().as_strided((rows, *first.shape[1:]), first.stride())
    together = torch.cat([part.detach() for part in parts])
    for part, place in zip(parts, together.split([len(part) for part in parts]), strict=True):
        part.data = place
    return together


def cached_rows(pages: torch.Tensor, step: Step, request: int) -> torch.Tensor:
    """(length, columns): the cached tokens of a step's request, in order."""
    length = step.lengths[request]
    return pages[step.page_table[request, : -(-length // PAGE)]].flatten(0, 1)[:length]


def decode_on_cpu(q: torch.Tensor, pages: torch.Tensor, step: Step, k: int, scale: float) -> torch.Tensor:
    """(b, h, k): what `mla_decode` computes of q (b, h, k + p), in torch; a request's heads are rows over one key."""
    out = []
    for i, heads in enumerate(q):
        rows = cached_rows(pages, step, i)
        out.append(scaled_dot_product_attention(heads[None], rows[None], rows[None, :, :k], scale=scale)[0])
    return torch.stack(out)


def _prepare(module: MlaAttention, state: Any, prefix: str, *_others: Any) -> None:
    prepare(state, prefix, dict(module.named_parameters()))
