"""`mla_decode`: absorbed MLA decode over a paged latent cache, by the version that is fastest for the shapes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from mla_var3.ops.engine import DecodeSchedule
from mla_var3.ops.request import (
    VECTOR,
    as_bytes,
    as_pages,
    bounds_of,
    compact,
    narrowed,
    problem_of,
    result,
    rows_of,
)
from mla_var3.ops.tracing import traceable
from mla_var3.ops.ways import compute, engine_of, way_for

if TYPE_CHECKING:
    import torch

    from mla_var3.device import Device
    from mla_var3.ops.engine import Engine
    from mla_var3.workload.decode import MlaProblem

LATENT = 512  # latent columns of every published MLA model


@traceable
def mla_decode(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    page_table: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    scale: float | None = None,
    causal: bool = False,
    cu_seqlens_q: torch.Tensor | None = None,
    mask: torch.Tensor | None = None,
    head_dim_v: int = LATENT,
    return_lse: bool = False,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
    fixed_split: int | None = None,
    schedule: DecodeSchedule | None = None,
    kernel: str | None = None,
    on: Engine | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Attention of q over each request's cached tokens, in latent space.

    q (b, s, h, k + p), bf16 or fp16. kv_cache (pages, tokens of a page, h_kv, k + p), or without h_kv, which is 1 then;
    columns 0..k-1 are the latent (the values, and the first part of the keys), the rest is rope. It is contiguous, but
    pages may lie further apart than they are long, by a multiple of 16 bytes. page_table (b, width) int32: entry j of a
    request is the page of its tokens j·page ..; entries past the last token are not read. seq_lens (b,) int32, read
    on the device; 0 is allowed. All on one GPU. Page tables, lengths and cu_seqlens_q may be int64: two small kernels
    bring each into int32, lengths into 0 .. width · page, so that no value stands for another. An entry of a used page
    that is outside of the cache is the caller's mistake, of either type: what is read then is undefined.

    q and page_table may have any strides of request, token and head, with columns beside each other and rows of q
    multiples of 16 bytes apart; so may out, and lse may have any, none of its elements over another. The versions in
    CuTe DSL, which are picked on Hopper, read and write such views as they are. Copies are made for other versions, of
    a q whose rows lie otherwise or over each other, and of seq_lens and cu_seqlens_q with gaps.

    scale: factor on q·k, any finite number; default (128 + p)^-1/2, that of decompressed heads with 128 + p columns
    (FlashMLA's default is another: (k + p)^-1/2). With one of 0 or below most versions copy q first. causal: query
    token i sees keys 0 .. length - s + i. head_dim_v: k. out, lse: where to write, (b, s, h, k) in q's dtype and
    (b, h, s) float32. return_lse: also returns the natural log-sum-exp of scale · q·k. A row that sees no key has out 0
    and lse +inf; one with a score that is NaN has out and lse NaN. Logits may be as large as docs/serving.md says.

    cu_seqlens_q: (b + 1,) int32, read on the device, where requests differ in their query tokens, as where prefill
    chunks and speculative tokens stand beside decodes: request i has the tokens cu_seqlens_q[i] .. cu_seqlens_q[i + 1]
    - 1 of q, which is (tokens, h, k + p) then, out (tokens, h, k) and lse (tokens, h). None is allowed. causal is at
    the end of each request. The last entry may be below the number of tokens; rows past it are not written.
    mask: (b, s, s) bool, for a tree of speculative tokens: query token i sees the newest token j, j = 0 .. s - 1,
    where mask[·, i, j] is true, and every token before those. Not with causal or cu_seqlens_q.

    fixed_split: tokens of a split, a multiple of 64, for results that do not depend on the rest of the batch: version,
    splits and order of sums follow from the request's own length and the problem class, which is what compiled code
    depends on: heads, query tokens, columns, dtype, but not b, the lengths or the width of the page table. So a request
    has the same bits alone, in any batch, at any place in it, and under a page table of any width.
    `mla_var3.ops.fixed` has the costs.
    schedule: of the calls of a step, in which lengths are the same in all layers: `DecodeSchedule` says more. To a
    program that torch traces it says nothing: each of its calls deals out its own work.
    kernel: a version's name ("cute-dsl/flash_mla_v23") in place of the dispatcher's pick. on: an
    `mla_var3.ops.engine.Engine` in place of the process's own. An engine keeps the planned kernels, their workspaces
    and the compiled code of the calls that it serves, and `Engine.forget` drops what it keeps: with one of its own a
    program bounds that memory, or gives it back, apart from all other calls. Such a call is no operator to torch.

    Never waits for the device and can be captured in a CUDA graph once a call with the same shapes has been made.
    Returns out, or (out, lse). Raises `UserError` in one sentence for arguments, a device or a problem that no version
    takes. To `torch.compile` and `torch.export` it is the operator `torch.ops.mla_var3.mla_decode`, or where out or lse
    is given `mla_decode_into`; `mla_var3.ops.library` has both.
    """
    import torch

    problem = problem_of(
        q, kv_cache, page_table, seq_lens, head_dim_v=head_dim_v, scale=scale, causal=causal,
        cu_seqlens_q=cu_seqlens_q, mask=mask,
    )  # fmt: skip
    served = engine_of(on, q, "q", "mla_decode")
    *tokens, h, _ = q.shape
    target = result("out", out, (*tokens, h, head_dim_v), q.dtype, q.device, strided=True)
    sums = result("lse", lse, (tokens[0], h, *tokens[1:]), torch.float32, q.device, strided=True)
    if len(q) and len(seq_lens):
        way = way_for(problem, served.hardware(q.device), fixed_split=fixed_split, kernel=kernel)
        cache = kv_cache.detach() if kv_cache.requires_grad else kv_cache
        if problem.strided_pages or cache.dim() == 3:
            cache = as_pages(cache)
        bounds, rows = bounds_of(problem), q.detach() if q.requires_grad else q
        in_line = rows.is_contiguous()
        rows = compact(rows) if in_line else rows_of(rows, VECTOR)
        table = narrowed(page_table, *bounds["page_table"], strided=True)
        lengths = narrowed(seq_lens, *bounds["seq_lens"])
        inputs: tuple[torch.Tensor, ...] = (rows, cache, table, lengths)
        if cu_seqlens_q is not None:
            inputs = (*inputs, narrowed(cu_seqlens_q, *bounds["cu_seqlens_q"]))
        if mask is not None:
            inputs = (*inputs, as_bytes(mask))
        apart_out = not ((out is None or out.is_contiguous()) and (lse is None or lse.is_contiguous()))
        if in_line and not apart_out and table.is_contiguous():
            served.run(way, problem, inputs, (target, sums), schedule)
        else:
            apart = [i for i in (0, 2) if not inputs[i].is_contiguous()]
            compute(served, way, problem, inputs, (target, sums), apart, apart_out, schedule)
    return (target, sums) if return_lse else target


def compile_for(
    problems: MlaProblem | Sequence[MlaProblem],
    device: Device | str | None = None,
    *,
    fixed_split: int | None = None,
) -> list[str]:
    """Compiles into the on-disk cache what `mla_decode` will pick for these problems; needs no GPU.

    device: a device or its key; default: the GPU that is here. Returns the labels of what was picked, one a problem.
    """
    from mla_var3.device import Device

    hardware = Device.detect() if device is None else Device.get(device) if isinstance(device, str) else device
    labels = []
    for problem in [problems] if not isinstance(problems, Sequence) else problems:
        way = way_for(problem, hardware, fixed_split=fixed_split)
        plan = way.make(problem, hardware)
        assert hardware is not None
        plan.plan_empty().compile(None, hardware)
        labels.append(str(getattr(way.key[0], "label", way.key[0])))
    return labels


def use_bundle(folder: str | Path) -> None:
    """Serves from a bundle of compiled kernels (`mla-var3 compile --bundle`), in this process and those it starts.

    Call it before the first call of a function, or set the environment variable MLA_VAR3_BUNDLES to the folder, or to
    several with colons between. What the bundle holds is loaded, not compiled, and needs no CuTe DSL. Raises
    `UserError` for a bundle that is damaged, or was made for another machine or another TVM-FFI.
    """
    from mla_var3.toolchain.bundle import open_bundle

    open_bundle(Path(folder))
    way_for.cache_clear()  # a version may be here now that was missing before
