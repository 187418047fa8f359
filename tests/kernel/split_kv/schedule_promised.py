"""What the tile scheduler promises, in plain Python: requests' tiles as a list, which is cut into workers' parts.

It shares no code with `split_kv.scheduler`: where that computes a worker's splits from two numbers, this makes the
whole list and cuts it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mla_var3.kernel.cute_python.split_kv.scheduler import Costs

#: (request, first KV tile, end tile); both 0 where a request has no key and its results are zeros.
Tiles = tuple[int, int, int]


@dataclass(frozen=True)
class Promised:
    """A schedule. how: `whole`, `even`, `shares` or `chunks`. splits: of each worker, in its order. span: points of a
    worker on the line."""

    how: str
    span: int
    splits: list[list[Tiles]]


def up(number: int, divisor: int) -> int:
    return -(-number // divisor)


def promised(
    lengths: Sequence[int], tokens: int, workers: int, fixed: int, costs: Costs, *, combines: bool, workers_each: int
) -> Promised:
    """The schedule of requests of these lengths, whose page table has room for `tokens` tokens each. fixed: tiles of a
    split that the caller fixes, or 0. combines: whether a combine is launched. workers_each: workers that each request
    may have as its own, 1 where requests may not be in shares."""
    units = [up(max(length, 0), costs.tokens) for length in lengths]
    if fixed:
        line = [(r, *chunk) for r, n in enumerate(units) for chunk in cut(n, fixed)]
        return Promised("chunks", up(len(line), workers), dealt(line, up(len(line), workers), workers))
    with_keys, longest = sum(n > 0 for n in units), max(units)
    span = up(len(units), workers)
    ways = [("whole", span * (longest + costs.overhead))]
    if workers_each > 1:
        ways.append(("shares", max(1, up(longest, workers_each)) + costs.overhead + costs.combine))
    share = max(1, up(sum(units) + costs.overhead * with_keys, workers))
    # How many workers merge a request, as a binary tree, if the longest has a part of each worker that it touches.
    levels = (min(longest // share + 2, 3) - 1).bit_length()
    ways.append(("even", share + costs.overhead + (costs.listed if combines else costs.level * levels)))
    how = min(ways, key=lambda way: way[1])[0]  # the first one of the best
    if how == "whole":
        return Promised(how, span, dealt([(r, 0, n) for r, n in enumerate(units)], span, workers))
    if how == "shares":
        splits: list[list[Tiles]] = [[] for _ in range(workers)]
        for r, n in enumerate(units):
            for i, chunk in enumerate(cut(n, max(1, up(n, workers_each)))):
                splits[r * workers_each + i].append((r, *chunk))
        return Promised(how, 1, splits)
    points = [(r, u) for r, n in enumerate(units) if n for u in (*[None] * costs.overhead, *range(n))]
    of_workers: list[list[Tiles]] = []
    for worker in range(workers):
        own: dict[int, list[int]] = {}
        for r, u in points[worker * share : (worker + 1) * share]:
            if u is not None:
                own.setdefault(r, []).append(u)
        of_workers.append([(r, tiles[0], tiles[-1] + 1) for r, tiles in own.items()])
    return Promised(how, share, of_workers)


def cut(units: int, step: int) -> list[tuple[int, int]]:
    """Chunks of up to `step` units; an empty one where there are no units."""
    return [(first, min(first + step, units)) for first in range(0, units, step)] or [(0, 0)]


def dealt(line: list[Tiles], span: int, workers: int) -> list[list[Tiles]]:
    return [line[worker * span : (worker + 1) * span] for worker in range(workers)]
