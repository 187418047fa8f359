"""Stages filled by boxes of 8 whole tokens, in place of boxes of 64 tokens by 64 columns.

Half of a token's latent columns, 512 bytes in one piece, 8 tokens a box: 4 KiB that lie within 9 of memory, where a
panel of 64 tokens takes 128 bytes of each of 72 KiB. Such reads cost less power (2 % of a kernel that only reads). A
box that comes whole lets its products begin late; a first pair in boxes of 8 tokens by 64 columns, so that they need
not, took another 1 to 2 % (version 19, of which the devlog is left).

A half of a stage is (group of 8 tokens, panel, token, column), 1024 bytes a group and panel, with the swizzle of 128
byte rows; the rope panel behind the two is a panel of 64 tokens, as elsewhere.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int16, Int32, Int64
from cutlass.cute.nvgpu import cpasync, warpgroup

from mla_var3.kernel.cute_python.lib import wgmma
from mla_var3.kernel.cute_python.lib.latent.shape import PANEL, TILE_N, Shape
from mla_var3.kernel.cute_python.lib.paged import BOX, EVICT_FIRST

GROUP = 8  # tokens of a box
GROUPS = TILE_N // GROUP  # of a tile


class TokenBoxes:
    """TMA atom and tensor of the cache: boxes of half a token's latent columns, modes (page, 64, panel, h_kv,
    num_pages). Python holds it; nothing is copied."""

    def __init__(self, whole: cute.CopyAtom, cache: cute.Tensor) -> None:
        self.whole, self.cache = whole, cache

    def of_head(self, kv_head: Int32) -> TokenBoxes:
        """The same of one kv head, without that mode."""
        return TokenBoxes(self.whole, self.cache[None, None, None, kv_head, None])


def make_tma(kv_cache: cute.Tensor, shape: Shape, shared: bool) -> tuple[Any, ...]:
    """Atom and tensor of boxes of whole tokens. shared: boxes may go to several blocks of a cluster."""
    num_pages, page, h_kv, width = kv_cache.shape
    strides = (h_kv * width, 1, PANEL, width, page * h_kv * width)
    view = cute.make_tensor(
        kv_cache.iterator, cute.make_layout((page, PANEL, width // PANEL, h_kv, num_pages), stride=strides)
    )
    box = (GROUP, PANEL, shape.half // PANEL)
    copy = cpasync.CopyBulkTensorTileG2SMulticastOp() if shared else cpasync.CopyBulkTensorTileG2SOp()
    return cpasync.make_tiled_tma_atom(copy, view, wgmma.k_major_layout(kv_cache.element_type, box), box, 1)


class TokenTile:
    """How a stage lies, as its readers see it. Python holds it; nothing is copied."""

    def __init__(self, shape: Shape, dtype: type) -> None:
        self.shape, self.dtype = shape, dtype
        self.half = shape.half * TILE_N  # elements of a half
        rows, columns = (GROUP, GROUPS), (PANEL, shape.half // PANEL)
        of_rows, of_columns = (PANEL, shape.half * GROUP), (1, GROUP * PANEL)
        self.keys_layout = cute.make_layout((rows, columns), stride=(of_rows, of_columns))
        self.values_layout = cute.make_layout((columns, rows), stride=(of_columns, of_rows))
        self.places = cute.make_layout((8, 8, rows, columns[1]), stride=(1, 8, of_rows, of_columns[1]))

    def _view(self, base: cute.Pointer, kind: warpgroup.SmemLayoutAtomKind, layout: cute.Layout) -> cute.Tensor:
        swizzle = warpgroup.make_smem_layout_atom(kind, self.dtype).inner
        return cute.make_tensor(cute.recast_ptr(base, swizzle), layout)

    def keys(self, stage: cute.Pointer) -> list[cute.Tensor]:
        """Left half, right half and rope panel of a stage as (64 tokens, columns)."""
        kind = warpgroup.SmemLayoutAtomKind.K_SW128
        rope = wgmma.k_major_layout(self.dtype, (TILE_N, PANEL))
        halves = [self._view(stage + i * self.half, kind, self.keys_layout) for i in range(2)]
        return [*halves, wgmma.smem_view(stage, 2 * self.half, rope)]

    def values(self, half: cute.Pointer) -> cute.Tensor:
        """Half of a stage as (columns, 64 tokens)."""
        return self._view(half, warpgroup.SmemLayoutAtomKind.MN_SW128, self.values_layout)

    def block(self, fragments: list[cute.Tensor], k: int) -> cute.Tensor:
        """The descriptors of 16 columns, of fragments of `keys`."""
        of_half = self.shape.half // wgmma.MMA_K
        return fragments[k // of_half][None, None, k % of_half]


class TokenSource:
    """What one producer loads of each tile of its stage: a half, and the rope panel where the half's reader frees it
    too. Python holds it; nothing is copied."""

    def __init__(self, by_tokens, kv_base, shape, stage, part, shares, tma, boxes, panels) -> None:
        self.shape, self.stage, self.shares = shape, stage, shares
        self.columns = shape.right if part else shape.left
        self.with_rope = shape.rope in shape.part(stage, part)
        self.rope, self.rope_boxes, self.rope_panels = tma, boxes, panels
        half = kv_base + (stage * shape.stage_elements + part * shape.half * TILE_N)
        count, alone = shape.half // PANEL, cute.make_layout(1)
        cut = (GROUP, PANEL, count)
        # Groups behind each other, each with its panels behind each other.
        places = wgmma.smem_view(half, 0, wgmma.k_major_layout(half.dtype, (GROUP, PANEL, count * GROUPS)))
        groups = cute.flat_divide(places, cut)[None, None, None, 0, 0, None]
        sources = cute.flat_divide(by_tokens.cache, cut)[None, None, None, None, 0, part, None]
        self.whole = by_tokens.whole
        self.groups, self.boxes = cpasync.tma_partition(
            self.whole, 0, alone, cute.group_modes(groups, 0, 3), cute.group_modes(sources, 0, 3)
        )


@cute.jit
def ask(
    atom: cute.CopyAtom,
    source: cute.Tensor,
    target: cute.Tensor,
    barrier: cute.Pointer,
    blocks: cutlass.Constexpr,  # of the cluster that the box goes to, or 0
):
    """One box, for this block or for all of its cluster."""
    if cutlass.const_expr(blocks):
        mask = Int16((1 << blocks) - 1)
        cute.copy(atom, source, target, tma_bar_ptr=barrier, mcast_mask=mask, cache_policy=Int64(EVICT_FIRST))
    else:
        cute.copy(atom, source, target, tma_bar_ptr=barrier, cache_policy=Int64(EVICT_FIRST))


@cute.jit
def load(
    to: cutlass.Constexpr,  # a `TokenSource`
    full: cute.Pointer,  # mbarriers of the stage, shared memory: one a panel
    token_box: Int32,
    page: Int32,
    rank: Int32,  # of this block in its cluster
):
    """One warp's boxes of a 64-token tile. Each panel's mbarrier completes a phase, in the order in which the panels
    are read; that of a half's first panel stands for all of the half."""
    columns, blocks = to.columns, max(to.shares, 1)
    with cute.arch.elect_one():
        cute.arch.mbarrier_arrive_and_expect_tx(full + columns[0], TILE_N * to.shape.half * 2)
        for i in cutlass.range_constexpr(1, len(columns)):
            cute.arch.mbarrier_arrive(full + columns[i])
    for turn in cutlass.range(GROUPS // blocks, unroll=1):
        group = turn * blocks + rank
        source = to.boxes[None, token_box * GROUPS + group, page]
        ask(to.whole, source, to.groups[None, group], full + columns[0], to.shares)
    if cutlass.const_expr(to.with_rope):
        rope = cutlass.const_expr(to.shape.rope)
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(full + rope, BOX * BOX * 2)
        if rank == to.stage % blocks:
            source = to.rope_boxes[None, token_box, rope, page]
            ask(to.rope, source, to.rope_panels[None, rope, to.stage], full + rope, to.shares)
