"""FlashAttention-3 with a second query part (`qv`), out of a vllm wheel.

    q = rope columns of the query, k = rope columns of the cache       S = q kᵀ + qv vᵀ
    qv = latent columns of the query, v = latent columns of the cache   out = softmax(scale · S) v

All four are views of the lab's tensors: nothing is copied. `plan()` makes the scheduler's metadata (a small kernel over
the lengths); a call is the attention and, where it split, the combine. Hopper only; the wheel's is the varlen build.
The library writes into our `out` and allocates the log-sum-exp and partial results.

The number of splits is the library's own choice, except where whole requests alone keep three quarters of the
multiprocessors busy: there it would still cut each in two (b128 s1 h128 t4096: 255.1 us, and 236.5 us uncut; h16: 150.1
and 146.1), and gets 1. A library is measured at its best.

With more than 64 query rows it loads whole pages by TMA, so what lies after a request's last token on its last page is
multiplied by a probability of 0: it must be finite there. The lab's NaN would reach the output, hence `input_options`.
"""

from __future__ import annotations

from typing import Any

from mla_var3.device import Device, Requirement
from mla_var3.kernel.peer.prims.find import Library
from mla_var3.kernel.peer.prims.kernel import (
    LATENT,
    ROPE,
    Attached,
    PeerDecodePlan,
    load_extension,
    named_arguments,
    natural_lse,
    takes_decode,
)

#: Query rows of one of the library's blocks.
TILE_M = 64


def splits_for(b: int, rows: int, num_sms: int) -> int:
    """`num_splits` for b requests of `rows` query rows: 1, or 0 for the library's own choice."""
    blocks = b * -(-rows // TILE_M)
    return 1 if 4 * blocks >= 3 * num_sms else 0


class Fa3QvPlan(PeerDecodePlan):
    """Plan of the extension's `fwd` with `q_v`, a page table and used lengths."""

    peer = "fa3_qv"
    requires = Requirement(archs=("sm_90a",), dtypes=("bf16", "fp16"), problem=takes_decode("fa3_qv"))
    allocates = True
    input_options = {"poison": False}  # noqa: RUF012

    def attach(self, library: Library, *inputs: Any) -> Attached:
        import torch

        q, kv_cache, page_table, seq_lens = inputs
        ops = load_extension(library, "_vllm_fa3_C")
        pd = self.problem
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
            "is_causal": pd.causal,
            "window_size_left": -1,
            "window_size_right": -1,
            "num_splits": splits_for(b, s * h, (self.device or Device.get("h200")).num_sms),
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
                "softmax_scale": pd.scale,
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
