"""FlashAttention: the third with a second query part, dense (`fa3_qv`) and sparse (`fa3_sparse`), and for prefill,
alone (`fa3`) and over a cached prefix (`fa3_chunked`), out of a vllm wheel; the fourth, for prefill (`fa4`)."""

from __future__ import annotations

import inspect
from dataclasses import replace
from importlib import import_module
from typing import TYPE_CHECKING, Any

from mla_var3.catalogue.libraries import Library
from mla_var3.device import Device, Requirement
from mla_var3.errors import UserError, Verdict
from mla_var3.kernel import chunks
from mla_var3.kernel.library import (
    LATENT,
    ROPE,
    Attached,
    NoKnobs,
    PeerDecodePlan,
    PeerMixin,
    PeerPrefillPlan,
    PeerSparsePlan,
    in_bf16,
    is_here,
    load_extension,
    longest,
    named_arguments,
    natural_lse,
    padded_values,
    prefill_lse,
    single_pages,
    takes_bf16,
    takes_decode,
    value_columns,
)
from mla_var3.packed_cache import VALUES
from mla_var3.runtime import KernelPlan, LibraryCall
from mla_var3.workload import chunked_prefill, sparse_decode

if TYPE_CHECKING:
    from mla_var3.workload.chunked_prefill import ChunkedProblem
    from mla_var3.workload.prefill import PrefillProblem

#: Query rows of one of FlashAttention-3's blocks.
TILE_M = 64


def splits_for(b: int, rows: int, num_sms: int) -> int:
    """`num_splits` for b requests of `rows` query rows: 1, or 0 for the library's own choice."""
    blocks = b * -(-rows // TILE_M)
    return 1 if 4 * blocks >= 3 * num_sms else 0


def fa3_attached(
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
    """The call of FlashAttention-3's extension with a second query part over a paged latent cache.

    q (b, s, h, 576), kv_cache (pages, page, 1, 576), page_table (b, width) and seq_lens (b,) int32; outputs
    (b, s, h, 512) and (b, h, s). The scheduler's metadata is made here.
    """
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


class Fa3QvPlan(PeerDecodePlan):
    """FlashAttention-3 with a second query part (`qv`), out of a vllm wheel.

        q = rope columns of the query, k = rope columns of the cache       S = q kᵀ + qv vᵀ
        qv = latent columns of the query, v = latent columns of the cache   out = softmax(scale · S) v

    All four are views of the lab's tensors: nothing is copied. `plan()` makes the scheduler's metadata (a small kernel
    over the lengths); a call is the attention and, where it split, the combine. Hopper only; the wheel's is the varlen
    build. The library writes into our `out` and allocates the log-sum-exp and partial results.

    The number of splits is the library's own choice, except where whole requests alone keep three quarters of the
    multiprocessors busy: there it would still cut each in two (b128 s1 h128 t4096: 255.1 us, and 236.5 us uncut; h16:
    150.1 and 146.1), and gets 1. A library is measured at its best.

    With more than 64 query rows it loads whole pages by TMA, so what lies after a request's last token on its last page
    is multiplied by a probability of 0: it must be finite there. The lab's NaN would reach the output, hence
    `input_options`.
    """

    peer = "fa3_qv"
    requires = Requirement(archs=("sm_90a",), dtypes=("bf16", "fp16"), problem=takes_decode("fa3_qv"))
    allocates = True
    input_options = {"poison": False}  # noqa: RUF012

    def attach(self, library: Library, *inputs: Any) -> Attached:
        return fa3_attached(library, *inputs, scale=self.problem.scale, causal=self.problem.causal, device=self.device)


class Fa3SparsePlan(PeerSparsePlan):
    """FlashAttention-3 with `qv` over a bf16 cache, the indices of each query token as a page table of size 1.

        plan():  cache → bf16, unless it is; the indices that name a token, in their order, as the page table of a
                 request of one query token, and their number as its length; the scheduler's metadata (a small kernel
                 over the lengths)
        call:    the attention and, where it split, the combine, both of the library

    The call is that of `fa3_qv`, with b · s requests of one query token. A cache of layout v32 is converted ahead of
    the call, which is not timed and rounds once: a server that decodes with this library keeps its cache in bf16. So
    the call reads 1152 bytes a token where the problem counts 656. Its page tables are not timed either: an indexer
    writes them so. The library reads a q with strides, but has one dimension for requests and query tokens: a strided q
    of several query tokens is copied ahead of the call too. Pages of size 1 are gathered by cp.async, and rows behind a
    request's last one are not loaded. Out of a vllm wheel, Hopper only.
    """

    peer = "fa3_sparse"
    requires = Requirement(archs=("sm_90a",), dtypes=("bf16",), problem=takes_bf16("fa3_sparse"), options=("strided",))
    allocates = True

    def attach(self, library: Library, *inputs: Any) -> Attached:
        given = sparse_decode.named(self.problem, *inputs)
        q = given["q"]
        b, s, h, columns = q.shape
        found = fa3_attached(
            library,
            q.reshape(b * s, 1, h, columns),
            in_bf16(self.problem.cache, given["cache"]).view(-1, 1, 1, columns),
            *single_pages(given),
            scale=self.problem.scale,
            causal=False,
            device=self.device,
        )

        def read() -> tuple[Any, ...]:
            out, lse = found.read()
            return out.view(b, s, h, VALUES), lse.view(b, s, h).transpose(1, 2).contiguous()

        return replace(found, read=read)


def takes_heads(peer: str) -> Any:
    """A predicate: keys have at most 256 columns, and the library is here."""

    def verdict(problem: PrefillProblem | ChunkedProblem) -> Verdict:
        if (columns := problem.d + problem.p) > 256 or columns % 8:
            return Verdict.no(
                f"peer/{peer} takes keys of up to 256 columns, a multiple of 8; the problem has {columns}"
            )
        return is_here(peer)(problem)

    return verdict


def fa3_varlen(
    attend: Any, q: Any, k: Any, v: Any, out: Any, of_q: Any, of_k: Any, most_q: int, most_k: int, scale: float,
    causal: bool, splits: int = 1,
) -> Any:  # fmt: skip
    """Arguments of FlashAttention-3's varlen entry, in its order, as this build has them."""
    return named_arguments(
        attend,
        {
            "q": q,
            "k": k,
            "v": v,
            "out": out,
            "cu_seqlens_q": of_q,
            "cu_seqlens_k": of_k,
            "max_seqlen_q": most_q,
            "max_seqlen_k": most_k,
            "softmax_scale": scale,
            "is_causal": causal,
            "window_size_left": -1,
            "window_size_right": -1,
            "softcap": 0.0,
            "is_rotary_interleaved": True,
            "num_splits": splits,
            "sm_margin": 0,
            "cp_world_size": 1,
            "cp_rank": 0,
        },
    )


class Fa3Plan(PeerPrefillPlan):
    """FlashAttention-3 for prefill: its varlen entry, out of a vllm wheel.

    Packed tensors as they are, with both cu_seqlens and both longest lengths; k and v may be views with strides. A call
    is the library's scheduling kernel over the lengths and the attention. It writes into our `out` and allocates the
    log-sum-exp. Values narrower than keys it takes as 128 beside 192 only: others are padded with zeros ahead of the
    call, which is not timed. Hopper only.
    """

    peer = "fa3"
    requires = Requirement(archs=("sm_90a",), problem=takes_heads("fa3"), options=("strided_kv", "grouped"))
    allocates = True

    def attach(self, library: Library, *inputs: Any) -> Attached:
        q, k, v, of_q, of_k = inputs
        columns = value_columns(q.shape[-1], v.shape[-1])
        out = q.new_empty((*q.shape[:2], columns))
        attend = load_extension(library, "_vllm_fa3_C").fwd.default
        arguments = fa3_varlen(
            attend, q, k, padded_values(v, columns), out, of_q, of_k, longest(of_q), longest(of_k), self.problem.scale,
            self.problem.causal,
        )  # fmt: skip
        last = [out.new_empty((q.shape[1], q.shape[0])).float()]

        def call() -> None:
            last[0] = attend(*arguments)[1]

        return Attached(
            call, lambda: (out[..., : v.shape[-1]], prefill_lse(last[0])), keep=inputs, outputs=(out,), made=last
        )


class Fa3ChunkedPlan(PeerMixin, KernelPlan):
    """A prefix as keys and values of every head, as serving engines do it: cuBLAS, FlashAttention-3, and a merge.

    Rows are gathered, projected and merged by what our own pipeline has for that (`mla_var3.kernel.chunks`), so that
    the two differ in attention alone: a piece is one call of the library's varlen entry, and its log-sum-exp, which the
    library allocates, is read where it lies. Where query tiles of 128 tokens are fewer than three quarters of the
    multiprocessors, the number of splits of the keys is the library's own choice, else 1. Hopper only.
    """

    workload = chunked_prefill.WORKLOAD
    tiling_type = NoKnobs
    peer = "fa3_chunked"
    requires = Requirement(archs=("sm_90a",), problem=takes_heads("fa3_chunked"))
    allocates = True
    leaves_out = ("in_place",)

    def attach(self, library: Library, *inputs: Any) -> Attached:
        attend = load_extension(library, "_vllm_fa3_C").fwd.default
        most = longest(chunked_prefill.named(inputs)["cu_seqlens_q"])
        pd = self.problem
        splits = splits_for(pd.b, most * pd.h // 2, (self.device or Device.get("h200")).num_sms)

        def attended(
            q: Any, keys: Any, values: Any, of_q: Any, of_k: Any, causal: bool
        ) -> tuple[LibraryCall, Any, Any]:  # fmt: skip
            out, lse = q.new_empty((*q.shape[:2], values.shape[-1])), q.new_empty(0).float()
            arguments = fa3_varlen(attend, q, keys, values, out, of_q, of_k, most, len(keys), pd.scale, causal, splits)

            def call() -> None:
                lse.data = attend(*arguments)[1]

            return LibraryCall(call, name="fa3"), out, lse

        stages, out, lse = chunks.decompress(self.problem, inputs, attended)

        def call() -> None:
            for stage in stages:
                stage.launch()

        return Attached(call, lambda: (out, prefill_lse(lse).t()), keep=inputs, outputs=(out,))


class Fa4Plan(PeerPrefillPlan):
    """FlashAttention-4, the one in CuTe DSL, for prefill.

    Package flash-attn-4 of github.com/Dao-AILab/flash-attention. It compiles its kernel when it first meets a kind of
    input (seconds), then keeps it for the process. `out` and `lse` are ours, so a call allocates nothing. On Hopper it
    has no absorbed form: it takes part in `prefill` only. Requests that are all alike are given as tensors (b, s, ...),
    which is its faster way; others packed, with both cu_seqlens. Values are padded as for `fa3`.
    """

    peer = "fa4"
    requires = Requirement(
        archs=("sm_90a", "sm_100a", "sm_103a"), problem=takes_heads("fa4"), options=("strided_kv", "grouped")
    )

    def attach(self, library: Library, *inputs: Any) -> Attached:
        import torch

        forward = getattr(import_module("flash_attn.cute.interface"), "_flash_attn_fwd", None)
        if forward is None:
            raise UserError(f"flash-attn-4 {library.version} has no _flash_attn_fwd: install another release.")
        pd, (q, k, v, of_q, of_k) = self.problem, inputs
        values = padded_values(v, value_columns(q.shape[-1], v.shape[-1]))
        out = q.new_empty((*q.shape[:2], values.shape[-1]))
        options: dict[str, Any] = {"softmax_scale": pd.scale, "causal": pd.causal}
        if pd.uniform:
            q, k, values, shaped = (x.unflatten(0, (pd.b, -1)) for x in (q, k, values, out))
            lse = torch.empty((pd.b, pd.h, pd.s), dtype=torch.float32, device=q.device)
        else:
            lengths = {"cu_seqlens_q": of_q, "cu_seqlens_k": of_k}
            lengths |= {"max_seqlen_q": longest(of_q), "max_seqlen_k": longest(of_k)}
            known = inspect.signature(forward).parameters
            options |= {name: x for name, x in lengths.items() if name in known or name.startswith("cu_")}
            shaped, lse = out, torch.empty((pd.h, len(q)), dtype=torch.float32, device=q.device)

        def call() -> None:
            forward(q, k, values, **options, out=shaped, lse=lse)

        def read() -> tuple[Any, ...]:
            packed = lse.transpose(0, 1).flatten(1) if pd.uniform else lse
            return out[..., : v.shape[-1]], prefill_lse(packed)

        return Attached(call, read, keep=inputs, outputs=(out, lse))
