"""A decode step of a whole attention layer in torch operations, as a model's own code has it."""

from __future__ import annotations

import torch
from torch.nn.functional import rms_norm

from mla_var3.workload import layer, rope


def decode_step(
    hidden: torch.Tensor,
    kv_cache: torch.Tensor,
    page_table: torch.Tensor,
    seq_lens: torch.Tensor,
    positions: torch.Tensor,
    slots: torch.Tensor,
    table: torch.Tensor,
    down: torch.Tensor,
    q_norm: torch.Tensor,
    kv_norm: torch.Tensor,
    up: torch.Tensor,
    kv_up: torch.Tensor,
    out_weight: torch.Tensor,
    out: torch.Tensor,
    h: int,
    scale: float,
) -> None:
    """Inputs of `workload.layer` into out (b, hidden), and the new rows into the cache. Every request has a token.

    Products are cuBLAS's, the projections with the shapes that `kernel.layer` gives them. Attention gathers each
    request's pages, and computes its softmax in float32 over logits in the dtype of the cache.
    """
    q_rank, k, p = len(q_norm), len(kv_norm), table.shape[1]
    d = len(kv_up) // (2 * h)
    query, latent, turning = (hidden @ down.t()).split([q_rank, k, p], 1)
    q = rms_norm(query, (q_rank,), q_norm, layer.EPS) @ up.t()
    q_nope, q_rope = q.view(-1, h, d + p).split([d, p], -1)
    turns = table[positions]
    cosines, sines = turns[:, : p // 2], turns[:, p // 2 :]
    q_rope = rope.rotated(q_rope.float(), cosines[:, None], sines[:, None], interleaved=True).to(q.dtype)
    turned = rope.rotated(turning.float(), cosines, sines, interleaved=True).to(q.dtype)
    row = torch.cat([rms_norm(latent, (k,), kv_norm, layer.EPS), turned], 1)
    kv_cache.view(-1, k + p).index_copy_(0, slots, row)
    w_uk, w_uv = kv_up.view(h, 2, d, k).unbind(1)
    queries = torch.cat([torch.einsum("bhd,hdk->bhk", q_nope, w_uk), q_rope], -1)
    rows = kv_cache[page_table].flatten(1, 3)  # (b, width · page, k + p)
    logits = torch.bmm(queries, rows.transpose(1, 2)).float() * scale
    seen = torch.arange(rows.shape[1], device=rows.device) < seq_lens[:, None]
    weights = logits.masked_fill(~seen[:, None], float("-inf")).softmax(-1).to(q.dtype)
    attended = torch.bmm(weights, rows[..., :k])
    heads = torch.einsum("bhk,hdk->bhd", attended, w_uv)
    torch.mm(heads.flatten(1), out_weight.t(), out=out)
