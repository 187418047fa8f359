"""The call of FlashAttention-3's extension with a second query part (`qv`) over a paged latent cache."""

from __future__ import annotations

from typing import Any

from mla_var3.catalogue.libraries import Library
from mla_var3.device import Device
from mla_var3.kernel.peer.prims.kernel import LATENT, ROPE, Attached, load_extension, named_arguments, natural_lse

#: Query rows of one of the library's blocks.
TILE_M = 64


def splits_for(b: int, rows: int, num_sms: int) -> int:
    """`num_splits` for b requests of `rows` query rows: 1, or 0 for the library's own choice."""
    blocks = b * -(-rows // TILE_M)
    return 1 if 4 * blocks >= 3 * num_sms else 0


def attached(
    library: Library,
    q: Any,
    kv_cache: Any,
    page_table: Any,
    seq_lens: Any,
    *,
    scale: float,
    causal: bool,
    device: Device | None,
) -> Attached:
    """q (b, s, h, 576), kv_cache (pages, page, 1, 576), page_table (b, width) and seq_lens (b,) int32; outputs
    (b, s, h, 512) and (b, h, s). The scheduler's metadata is made here."""
    import torch

    ops = load_extension(library, "_vllm_fa3_C")
    b, s, h, _ = q.shape
    page, longest = kv_cache.shape[1], page_table.shape[1] * kv_cache.shape[1]
    flat = q.view(b * s, h, LATENT + ROPE)
    starts = torch.arange(0, (b + 1) * s, s, dtype=torch.int32, device=q.device)
    out = q.new_empty((b * s, h, LATENT))
    shared = {
        "max_seqlen_q": s,
        "max_seqlen_k": longest,
        "seqused_k": seq_lens,
        "cu_seqlens_q": starts,
        "is_causal": causal,
        "window_size_left": -1,
        "window_size_right": -1,
        "num_splits": splits_for(b, s * h, (device or Device.get("h200")).num_sms),
        "sm_margin": 0,
    }
    schedule = ops.get_scheduler_metadata.default
    planning = named_arguments(
        schedule,
        {
            **shared,
            "batch_size": b,
            "num_heads": h,
            "num_heads_k": 1,
            "headdim": ROPE,
            "headdim_v": LATENT,
            "qkv_dtype": q.dtype,
            "page_size": page,
            "max_seqlen_k_new": 0,
            "has_softcap": False,
        },
    )
    metadata = schedule(*planning)
    attend = ops.fwd.default
    arguments = named_arguments(
        attend,
        {
            **shared,
            "q": flat[..., LATENT:],
            "k": kv_cache[..., LATENT:],
            "v": kv_cache[..., :LATENT],
            "q_v": flat[..., :LATENT],
            "out": out,
            "page_table": page_table,
            "softmax_scale": scale,
            "softcap": 0.0,
            "is_rotary_interleaved": True,
            "scheduler_metadata": metadata,
            "cp_world_size": 1,
            "cp_rank": 0,
        },
    )
    last = [out.new_empty((h, b * s), dtype=torch.float32)]

    def call() -> None:
        last[0] = attend(*arguments)[1]

    place = next(i for i, argument in enumerate(arguments) if argument is metadata)

    def with_schedule() -> None:
        last[0] = attend(*arguments[:place], schedule(*planning), *arguments[place + 1 :])[1]

    def read() -> tuple[Any, ...]:
        return out.view(b, s, h, LATENT), natural_lse(last[0].view(h, b, s).transpose(0, 1).contiguous())

    return Attached(call, read, keep=(metadata, starts), outputs=(out,), made=last, with_schedule=with_schedule)
