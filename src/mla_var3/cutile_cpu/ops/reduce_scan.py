"""Reductions and scans with any function of two values.

The function's operations run on many scalars at once. Neighbours are combined pairwise, in order, so a function that
is associative and not commutative gets its arguments in the right order; cuTile leaves open how it is bracketed.
"""

from __future__ import annotations

from typing import Any

import torch

from mla_var3.cutile_cpu.dtypes import Dtype, settle, tensor, together
from mla_var3.cutile_cpu.errors import Unbatchable
from mla_var3.cutile_cpu.ops import Registers, Step, implements


class Combine:
    """A reduction's body as a function of tuples of tensors."""

    def __init__(self, op: Any, cx: Any) -> None:
        self.types: list[Dtype] = [cx.dtype(x) for x in op.xs]
        # The body's parameters are pairs: left and right of the first input, of the second, …
        self.parameters = cx.slots_of(op.body.params)
        self.elementwise = all(
            tuple(getattr(v.get_type(), "shape", ())) == () for inner in op.body for v in inner.result_vars
        )
        before, cx.lanes = cx.lanes, self.elementwise
        known = set(cx.slots.values())
        self.body: Step = cx.block(op.body)
        cx.lanes = before
        cx.batchable &= self.elementwise
        outer = [v for inner in op.body for v in inner.all_inputs() if cx.slot(v) in known - set(self.parameters)]
        #: Scalars from outside.
        self.outer = cx.slots_of([v for v in outer if getattr(v.get_type(), "shape", None) == ()])

    def _call(self, R: Registers, left: list[Any], right: list[Any]) -> list[Any]:
        for i, slot in enumerate(self.parameters):
            R[slot] = (right if i % 2 else left)[i // 2]
        _, values = self.body(R)
        return list(values)

    def __call__(self, R: Registers, left: list[torch.Tensor], right: list[torch.Tensor]) -> list[torch.Tensor]:
        if self.elementwise:
            if any(isinstance(R[slot], torch.Tensor) and R[slot].dim() for slot in self.outer):
                raise Unbatchable  # it is another one for each block
            shape = left[0].shape
            values = self._call(R, left, right)
            return [tensor(v, t).expand(shape) for v, t in zip(values, self.types, strict=True)]
        # The body makes tiles of its own: one pair at a time.
        out = [torch.empty_like(x) for x in left]
        for at in torch.cartesian_prod(*(torch.arange(n) for n in left[0].shape)).reshape(-1, left[0].dim()).tolist():
            here = tuple(at)
            pick = [[settle(x[here], t) for x, t in zip(side, self.types, strict=True)] for side in (left, right)]
            for target, value, dtype in zip(out, self._call(R, *pick), self.types, strict=True):
                target[here] = tensor(value, dtype)
        return out


@implements("tile_reduce")
def _reduce(op: Any, cx: Any) -> Step:
    xs, results, rank = cx.slots_of(op.xs), cx.slots_of(op.result_vars), cx.rank(op.xs[0])
    axis = op.axis - rank
    combine = Combine(op, cx)

    def step(R: Registers) -> None:
        tiles = together([R[x] for x in xs], rank)
        while tiles[0].shape[axis] > 1:
            count = tiles[0].shape[axis]
            pairs = [t.unflatten(axis, (count // 2, 2)) for t in tiles]
            tiles = combine(R, [p.select(axis, 0) for p in pairs], [p.select(axis, 1) for p in pairs])
        for slot, tile, dtype in zip(results, tiles, combine.types, strict=True):
            R[slot] = settle(tile.select(axis, 0), dtype)

    return step


@implements("tile_scan")
def _scan(op: Any, cx: Any) -> Step:
    xs, results, rank, reverse = cx.slots_of(op.xs), cx.slots_of(op.result_vars), cx.rank(op.xs[0]), op.reverse
    axis = op.axis - rank
    combine = Combine(op, cx)

    def step(R: Registers) -> None:
        tiles = [t.flip(axis) if reverse else t for t in together([R[x] for x in xs], rank)]
        count, reach = tiles[0].shape[axis], 1
        while reach < count:
            left = [t.narrow(axis, 0, count - reach) for t in tiles]
            right = [t.narrow(axis, reach, count - reach) for t in tiles]
            joined = combine(R, left, right)
            tiles = [torch.cat((t.narrow(axis, 0, reach), j), dim=axis) for t, j in zip(tiles, joined, strict=True)]
            reach *= 2
        for slot, tile in zip(results, tiles, strict=True):
            R[slot] = tile.flip(axis) if reverse else tile

    return step
