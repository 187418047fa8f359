"""Attention of prompts over decompressed heads: `mla_prefill`, and `flash_attn_varlen_func` under flash_attn's name.

Prompts and chunks of prompts lie behind each other in q, k and v, and two lists on the device say where each begins. So
requests of all lengths are one call, nothing is padded, and the host need not know a length.
"""

from __future__ import annotations

import functools
import itertools
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from mla_var3.dispatch import boundaries
from mla_var3.errors import Infeasible, Unsupported, UserError
from mla_var3.ops.engine import engine, new_like
from mla_var3.ops.request import (
    VECTOR,
    compact,
    dtype_name,
    integers,
    judge,
    named_as,
    narrowed,
    number,
    number_of,
    result,
    rows_of,
)
from mla_var3.ops.tracing import traceable
from mla_var3.ops.ways import compute, engine_of, way_for
from mla_var3.workload import MOST_LISTED
from mla_var3.workload.prefill import PrefillProblem, write

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from mla_var3.device import Device
    from mla_var3.ops.engine import Engine, Remembered, Way
    from mla_var3.workload.prefill import PrefillClass

#: The version that computes where no other takes a problem, and on a CPU: right everywhere, and slow.
ANYWHERE = "torch/flash_attention"
#: Dtypes that prompts have, the last one on a CPU.
DTYPES = ("bf16", "fp16", "fp32")


@traceable
def mla_prefill(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    *,
    scale: float | None = None,
    causal: bool = True,
    return_lse: bool = False,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
    kernel: str | None = None,
    on: Engine | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Attention of each request's query tokens to the request's keys, head by head.

    q (n, h, dk), k (m, h_kv, dk), v (m, h_kv, dv), where h is a multiple of h_kv and dv at most dk; of DeepSeek's
    models dk is 192, dv 128, and h_kv is h. bf16 or fp16, on a CPU fp32 too. cu_seqlens_q and cu_seqlens_k (b + 1,), on
    the device of q, int32, or int64, which costs two small launches a list and about 40 us of the host: request i has
    the query tokens cu_seqlens_q[i] .. cu_seqlens_q[i + 1] - 1 of q, and those keys of k and v that cu_seqlens_k says.
    Both begin with 0 and never decrease; their last entries are at most n and
    m. On a CPU this is checked; a GPU reads them in the kernel, where nobody could tell, and with offsets beyond n or m
    the kernel reads and writes memory behind the tensors. A request may have no tokens.

    causal: query token i of s sees the keys 0 .. t - s + i of its t, so that chunks of a prompt see the prefix and
    themselves. scale: factor on q·k, default dk^-1/2. k and v may be views with gaps between their rows, as of one
    up-projection: columns beside each other, rows multiples of 16 bytes apart. Others are copied first, as is a q that
    is not contiguous. out, lse: where to write, (n, h, dv) in q's dtype and (h, n) float32. return_lse: also returns
    the natural log-sum-exp of scale · q·k, with which results over parts of the keys are merged. A query token that
    sees no key has out 0 and lse -inf; one with a score that is NaN has out and lse NaN. Rows from cu_seqlens_q[b] on
    are not written, and what k and v hold from cu_seqlens_k[b] on reaches no result. kernel, on: as of `mla_decode`.

    On a GPU it never waits for the device and can be captured in a CUDA graph once a call with the same widths has been
    made, unless no version takes the problem: then, and on a CPU, the version in torch computes, which waits.
    `mla-var3 dispatch show --workload prefill` says which version is picked. It computes no gradient, and refuses a q,
    k or v that requires one. Returns out, or (out, lse). Raises `UserError` in one sentence for what does not fit. To
    `torch.compile` it is the operator `torch.ops.mla_var3.mla_prefill`, or `mla_prefill_into` where out or lse is
    given.
    """
    again = _again(q, k, v, cu_seqlens_q, cu_seqlens_k, scale, causal, out, lse, return_lse, kernel, on)
    if again is not None:
        return again if return_lse else again[0]
    import torch

    judge("q", q, (None, None, None), None, q)
    judge("k", k, (None, None, q.shape[2]), q.dtype, q)
    judge("v", v, (len(k), k.shape[1], None), q.dtype, q)
    require_no_gradient(q=q, k=k, v=v)
    n, h, dk = q.shape
    m, h_kv, dv = v.shape
    if not 0 < dv <= dk:
        raise UserError(f"v has {dv} columns and k {dk}: values have at least one column, and no more than keys.")
    if not h_kv or h % h_kv:
        raise UserError(f"{h} heads of q do not share {h_kv} heads of k and v evenly: h must be a multiple of h_kv.")
    of_q = integers("cu_seqlens_q", cu_seqlens_q, (None,), q, 0, n)
    of_k = integers("cu_seqlens_k", cu_seqlens_k, (len(of_q),), q, 0, m)
    if len(of_q) < 2:
        raise UserError(f"cu_seqlens_q is {tuple(of_q.shape)}: pass (b + 1,), where each request begins, and the end.")
    number_of("requests", "cu_seqlens_q", len(of_q) - 1)
    target = result("out", out, (n, h, dv), q.dtype, q.device)
    sums = result("lse", lse, (h, n), torch.float32, q.device)
    keys, values = rows_of(k, VECTOR), rows_of(v, VECTOR)
    problem = _problem(
        len(of_q) - 1, n, m, h, h_kv, dv, dk - dv, bool(causal),
        dtype_name(q.dtype, "q", DTYPES, "pass torch.bfloat16, torch.float16, or on a CPU torch.float32"),
        None if scale is None else number("scale", scale), not (keys.is_contiguous() and values.is_contiguous()),
    )  # fmt: skip
    given = _signature(q, k, v, h, dk, h_kv, dv, scale, causal, kernel) if keys.data_ptr() == k.data_ptr() else None
    _serve(problem, (compact(q.detach()), keys, values, of_q, of_k), (target, sums), kernel, on, given)
    return (target, sums) if return_lse else target


#: Tokens of all requests up to which a call is remembered, where the version takes so many.
MOST_REMEMBERED = 1 << 21


def _signature(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, h: int, dk: int, h_kv: int, dv: int, scale: float | None,
    causal: bool, kernel: str | None,
) -> tuple[Any, ...] | None:  # fmt: skip
    """What compiled code, the choice of a version and the launch depend on, beside lengths; None for tensors that are
    copied or detached first. Strides of k and v are those of rows within rows, whatever their number."""
    if not q.is_contiguous() or q.requires_grad or k.requires_grad or v.requires_grad:
        return None
    strides = None
    if not (k.is_contiguous() and v.is_contiguous()):
        strides = k.stride(), v.stride()
        for (token, head, column), columns in zip(strides, (dk, dv), strict=True):
            if column != 1 or head < columns or token < head * h_kv:
                return None
    return q.dtype, h, dk, h_kv, dv, strides, scale, causal, kernel


def _again(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, of_q: torch.Tensor, of_k: torch.Tensor, scale: float | None,
    causal: bool, out: torch.Tensor | None, lse: torch.Tensor | None, return_lse: bool, kernel: str | None,
    on: Engine | None,
) -> tuple[torch.Tensor, torch.Tensor] | None:  # fmt: skip
    """(out, lse) of a call like one that was judged before; None for another one, and for one that is wrong. What the
    compiled function compares before it launches is not looked at: of k the shape, of all but q the dtype, lse and
    of_k."""
    try:
        index = q.get_device()
        if (index < 0 and on is None) or not q.is_contiguous() or (scale is not None and type(scale) is bool):
            return None
        if q.requires_grad or k.requires_grad or v.requires_grad or not (out is None or out.is_contiguous()):
            return None
        strides = None if k.is_contiguous() and v.is_contiguous() else (k.stride(), v.stride())
        served = engine() if on is None else on
        call = q.shape, v.shape, of_q.numel(), of_q.dtype, q.dtype, strides, scale, causal, kernel
        found = served.remembered(call, index)
        if found is None:
            import torch

            if of_q.dtype == torch.int64:
                of_q, of_k = narrowed(of_q, 0, len(q)), narrowed(of_k, 0, len(k))
                return _again(q, k, v, of_q, of_k, scale, causal, out, lse, return_lse, kernel, on)
            found = _alike(served, index, q, k, v, of_q, of_k, scale, causal, kernel)
            if found is None:
                return None
            served.remember(call, index, found)
        if out is None:
            out = found.new_out()
        if lse is None:
            lse = found.new_lse() if return_lse or found.spare is None else found.spare
        found.handle(q, k, v, of_q, of_k, out, lse, *found.rest)
    except (AttributeError, TypeError, ValueError):  # of what does not fit, which the judge says in one sentence
        return None
    return out, lse


def _alike(
    served: Engine, index: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, of_q: torch.Tensor,
    of_k: torch.Tensor, scale: float | None, causal: bool, kernel: str | None,
) -> Remembered | None:  # fmt: skip
    """What a call of the same signature with other lengths has left, for calls with these, if it serves them too."""
    import torch

    (n, h, dk), (m, h_kv, dv), b = q.shape, v.shape, of_q.numel() - 1
    signature = _signature(q, k, v, h, dk, h_kv, dv, scale, causal, kernel)
    if signature is None or of_q.dtype != torch.int32 or of_k.dtype != torch.int32:
        return None
    found = served.remembered((signature, _regime(b, n, m, h, h_kv, dk, dv, causal, q.dtype)), index)
    if found is None or not (0 < n <= found.facts and 0 < m <= found.facts and 0 < b <= MOST_LISTED):
        return None
    spare = found.bound.spare_words(n * h)
    return replace(
        found, new_out=new_like(q.dtype, q.device, n, h, dv), new_lse=new_like(torch.float32, q.device, h, n),
        spare=None if spare is None else spare.view(h, n),
    )  # fmt: skip


# Kept, since a call asks for it that is remembered.
@functools.lru_cache(maxsize=4096)
def _regime(
    b: int, n: int, m: int, h: int, h_kv: int, dk: int, dv: int, causal: bool, dtype: torch.dtype
) -> tuple[bool, ...]:
    """On which sides of the dispatcher's boundaries in lengths a call is."""
    bounds = boundaries("prefill")
    if not bounds:
        return ()
    like = _problem(1, 1, 1, h, h_kv, dv, dk - dv, bool(causal), dtype_name(dtype, "q", DTYPES), None, False)
    # A copy with other lengths, which a constructor would judge for longer than a launch takes.
    problem = object.__new__(PrefillProblem)
    lengths = (("queries", n), ("keys", m))
    problem.__dict__.update(like.__dict__, b=b, s=max(1, -(-n // b)), t=-(-m // b), lengths=lengths)
    return tuple(bound.holds(problem) for bound in bounds)


def flash_attn_varlen_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: torch.Tensor | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`mla_prefill` with the arguments of flash_attn 2.8's function of this name: a program changes its import.

    q (n, h, dk), k (m, h_kv, dk), v (m, h_kv, dv), cu_seqlens_q and cu_seqlens_k (b + 1,) int32 or int64: as of
    `mla_prefill`; values may be narrower than keys, which flash_attn refuses. max_seqlen_q and max_seqlen_k are not
    looked at, as the kernel reads the lengths. deterministic: every call gives the same bits, and there is no backward
    pass.
    dropout_p, window_size, softcap, alibi_slopes and block_table must be left at their defaults, and q, k and v must
    not require a gradient. return_attn_probs: returns (out, lse (h, n) float32, an empty tensor), as flash_attn does
    without dropout; lse is -inf, and not +inf, where a query sees no key.
    """
    plain = alibi_slopes is None and block_table is None and type(dropout_p) is float and type(softcap) is float
    if not plain or dropout_p or softcap or window_size != (-1, -1):
        _refuse(dropout_p, window_size, softcap, alibi_slopes, block_table)
    if softmax_scale is not None:
        softmax_scale = number("softmax_scale", softmax_scale)
    made = mla_prefill(
        q, k, v, cu_seqlens_q, cu_seqlens_k, causal=bool(causal), return_lse=return_attn_probs, scale=softmax_scale
    )
    return (*made, q.new_empty(0)) if isinstance(made, tuple) else made


def _refuse(dropout_p: Any, window_size: Any, softcap: Any, alibi_slopes: Any, block_table: Any) -> None:
    """Raises `UserError` for the first of these that is not at its default."""
    import torch

    refused: tuple[tuple[str, Any, bool, str], ...] = (
        ("dropout_p", dropout_p, isinstance(dropout_p, (int, float)) and dropout_p == 0, "0.0"),
        ("window_size", window_size, tuple(window_size) in ((-1, -1), (None, None)), "(-1, -1)"),
        ("softcap", softcap, isinstance(softcap, (int, float)) and softcap == 0, "0.0"),
        ("alibi_slopes", alibi_slopes, alibi_slopes is None, "None"),
        ("block_table", block_table, block_table is None, "None"),
    )
    for name, value, is_default, default in refused:
        if not is_default:
            what = f"a {type(value).__name__}" if isinstance(value, torch.Tensor) else repr(value)
            more = ": mla_chunk_prefill attends to a paged cache" if name == "block_table" else ""
            raise UserError(f"{name} is {what}, which no version computes{more}; leave it at {default}.")


def require_no_gradient(**tensors: torch.Tensor) -> None:
    """Raises `UserError` for an argument that requires a gradient, where torch records them."""
    import torch

    for name, tensor in tensors.items():
        if tensor.requires_grad and torch.is_grad_enabled():
            raise UserError(
                f"{name} requires a gradient and none is computed: call it under torch.no_grad(), or pass "
                f"{name}.detach()."
            )


def _serve(
    problem: PrefillProblem,
    inputs: Sequence[torch.Tensor],
    outputs: Sequence[torch.Tensor],
    kernel: str | None,
    on: Engine | None,
    signature: tuple[Any, ...] | None,
) -> None:
    """Computes the problem of a call, unless it has no query token. signature: under which later calls may find it."""
    q, k, v, *offsets = inputs
    if kernel is None and on is None and q.device.type == "cpu":
        for name, x, rows in zip(("cu_seqlens_q", "cu_seqlens_k"), offsets, (len(q), len(k)), strict=True):
            _judge_offsets(name, x.tolist(), rows)
        if len(q):
            write(problem, inputs, outputs)
        return
    served = engine_of(on, q, "q", "mla_prefill")
    if not len(q):
        return
    if not len(k):  # a descriptor of no rows is none; a row that no request has is not read
        k, v = k.new_zeros((1, *k.shape[1:])), v.new_zeros((1, *v.shape[1:]))
        problem = problem.replace(lengths={"queries": len(q), "keys": 1})
    hardware = served.hardware(q.device)
    way = _way(problem.replace(strided_kv=False), hardware, kernel)
    if way.key[0].label == ANYWHERE and served.capture(served.stream(q.device)) is not None:
        raise UserError(
            "a graph is being captured, and no version takes these widths on this device but the one in torch, which "
            "waits for it: call outside of the capture."
        )
    remember = None
    if way.any_size and signature is not None and problem.keys:
        (n, h, dk), (m, h_kv, dv) = q.shape, v.shape
        regime = _regime(problem.b, n, m, h, h_kv, dk, dv, problem.causal, q.dtype)
        remember = (signature, regime), _most_tokens(way, problem.problem_class(), hardware)
    compute(
        served, way, problem, (q, k, v, *offsets), outputs, apart=(1, 2) if problem.strided_kv else (),
        field="strided_kv", remember=remember,
    )  # fmt: skip


def _judge_offsets(name: str, offsets: Sequence[int], rows: int) -> None:
    """Raises `UserError` for offsets on the host that are none."""
    if offsets[0] != 0 or any(end < begin for begin, end in itertools.pairwise(offsets)) or offsets[-1] > rows:
        raise UserError(
            f"{name} is {offsets[:4]} .. {offsets[-1]}: it must begin with 0, never decrease, and end at {rows} tokens "
            "or before."
        )


@functools.lru_cache(maxsize=4096)
def _way(problem: PrefillProblem, device: Device | None, kernel: str | None) -> Way:
    """How a problem is computed: by the dispatcher's pick, a version that the caller names, or where none takes the
    problem by the version in torch."""
    try:
        way = way_for(problem, device, kernel=ANYWHERE if kernel is None and device is None else kernel)
    except Unsupported:
        if kernel is not None:
            raise
        way = way_for(problem, device, kernel=ANYWHERE)
    plan = way.make(problem, device)
    plan.supported().require(Unsupported)  # here, as one kernel may serve problems that it was not planned for
    plan.feasible().require(Infeasible)
    # Prompts differ in length from call to call, and planning takes a millisecond. A copy of q, which a scale of zero
    # or below takes, has q's size.
    return replace(way, any_size=plan.any_size and problem.scale > 0)


@functools.lru_cache(maxsize=4096)
def _most_tokens(way: Way, kind: PrefillClass, device: Device | None) -> int:
    """Tokens of queries or keys, a power of two, of which a version takes any number up to it; 0: not even one."""
    tokens = MOST_REMEMBERED
    while tokens:
        fields = {name: getattr(kind, name) for name in ("h", "h_kv", "p", "d", "causal", "dtype")}
        plan = way.make(PrefillProblem(**fields, lengths={"queries": tokens, "keys": tokens}), device)
        if plan.supported() and plan.feasible():
            break
        tokens //= 2
    return tokens


# One object for equal problems: making and judging one takes longer than all else that a call does on the host.
@functools.lru_cache(maxsize=4096)
@named_as(
    b="cu_seqlens_q (b + 1,): b", h="q (n, h, dk): h", h_kv="k (m, h_kv, dk): h_kv", d="v (m, h_kv, dv): dv",
    p="k (m, h_kv, dk): dk", **{"lengths.queries": "q (n, h, dk): n", "lengths.keys": "k (m, h_kv, dk): m"},
)  # fmt: skip
def _problem(
    b: int, n: int, m: int, h: int, h_kv: int, d: int, p: int, causal: bool, dtype: str, scale: float | None,
    strided: bool,
) -> PrefillProblem:  # fmt: skip
    return PrefillProblem(
        b=b, h=h, h_kv=h_kv, d=d, p=p, causal=causal, dtype=dtype, softmax_scale=scale, strided_kv=strided,
        lengths={"queries": n, "keys": m},
    )  # fmt: skip
