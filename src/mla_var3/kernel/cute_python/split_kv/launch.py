"""The host function of dense decode versions: from a call's tensors to the launches of schedule, kernel and combine.

A version is one attention kernel with what its code is specialised on, its geometry; all versions are launched alike.
The call's tensors come one by one, as a compiled host function takes them; kernels get them in groups. The sparse
versions have host functions of their own. Flags and workspaces are made in `decode_host.workspaces`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cuda.bindings.driver import CUstream
from cutlass import Float32, Int32

from mla_var3.kernel.cute_python.prims import paged
from mla_var3.kernel.cute_python.prims.sync import has_dependents
from mla_var3.kernel.cute_python.split_kv import combine, rows, scheduler
from mla_var3.kernel.cute_python.split_kv.partials import Results


class Inputs(NamedTuple):
    """What a decode kernel reads, in global memory."""

    q: cute.Tensor  # (b, s, h, k + p) 16-bit, columns contiguous; packed (tokens, 1, h, k + p)
    tma: Any  # TMA copy of a box of the cache: some tokens of a page, 64 columns; None where rows are gathered
    cache: cute.Tensor  # TMA tensor of the cache, (page, k + p, h_kv, num_pages); where rows are gathered, the cache
    page_table: cute.Tensor  # (b, max_pages) int32, entries of a row contiguous
    seq_lens: cute.Tensor  # (b,) int32; packed, the blocks' keys
    mask: Any  # (b, s, s) uint8, or None: whether a query token sees each of the newest s keys


@dataclass(frozen=True)
class Version:
    """An attention kernel and what its code is specialised on.

    kernel: takes `Inputs`, `Results`, flags, `Schedule`, scale in the log2 domain, `Pool` and the geometry.

    geometry: an object with the problem's s, page, packed, tree and causal, and with these attributes. box: tokens of a
    TMA box of the cache, or 0 where rows are gathered. tiles: query tiles of a request. threads: threads of a CTA.
    cluster: the cluster's shape, or None. sharing: CTAs that load for each other by multicast. costs, partials, merge:
    `scheduler.Costs`, `partials.Partials` and `combine.Merge`.
    """

    kernel: Any
    geometry: Any


@cute.jit
def launch_decode(
    q: cute.Tensor,  # (b, s, h, k + p); packed (tokens, h, k + p), as is out, and lse (tokens, h)
    kv_cache: cute.Tensor,  # (num_pages, page, h_kv, k + p) 16-bit, global memory, contiguous within a page
    page_table: cute.Tensor,
    seq_lens: cute.Tensor,
    offsets_or_mask: cute.Tensor | None,  # where queries are packed, (b + 1,) int32; where there is a tree, its mask
    out: cute.Tensor,
    lse: cute.Tensor,
    of_partials: cute.Tensor,  # `Partials.views`
    flags: cute.Tensor,
    words: cute.Tensor,  # `scheduler.schedule_in`
    scale: Float32,
    workers: Int32,
    fixed: Int32,  # KV tiles of a split, or 0: the scheduler chooses
    mode: Int32,  # `scheduler.OWN`, `MADE` or `SHARED`
    version: cutlass.Constexpr,  # `Version`
    stream: CUstream,
):
    """Launches a CTA for each query tile and worker. `scheduler.make_schedule` goes ahead of it where this call makes a
    schedule or cuts packed queries into blocks, and the combine follows it where the pool says so (`Pool.combined`).
    All of them are programmatic dependents."""
    geometry = version.geometry
    tma, cache = None, kv_cache
    if cutlass.const_expr(geometry.box):
        tma, cache = paged.make_page_tma(kv_cache, geometry.sharing > 1, geometry.box)
    schedule = scheduler.schedule_in(words, workers, geometry.packed)
    requests, mask = q.shape[0], None
    if cutlass.const_expr(geometry.tree):
        mask = offsets_or_mask
    if cutlass.const_expr(geometry.packed):
        requests = schedule.blocks.shape[0]
        q, out, lse = rows.packed(q), rows.packed(out), rows.packed_lse(lse, geometry.s)
    pool = scheduler.make_pool(requests, page_table.shape[1] * geometry.page, workers, fixed, mode, geometry.costs)
    scheduler.prepare(
        schedule, seq_lens, offsets_or_mask, pool, mode, geometry.s, geometry.causal, geometry.costs, stream
    )  # fmt: skip
    lengths, results = schedule.lengths(seq_lens), Results(out, lse, *geometry.partials.views(of_partials))
    inputs = Inputs(q, tma, cache, page_table, lengths, mask)
    version.kernel(inputs, results, flags, schedule, scale * math.log2(math.e), pool, geometry).launch(
        grid=(geometry.tiles, workers, 1),
        block=(geometry.threads, 1, 1),
        cluster=geometry.cluster,
        min_blocks_per_mp=1,
        stream=stream,
        use_pdl=has_dependents(),
    )
    ctas = workers * geometry.tiles
    combine.launch(results, schedule.table, lengths, schedule.blocks, pool, 2 * ctas, geometry.merge, stream)
