"""What has to hold of every schedule, each property a function that raises AssertionError where it does not."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from typing import Any

from device_on_cpu import of_values
from schedule_promised import Promised, promised, up
from schedule_walked import (
    BeginShares,
    Deal,
    Listed,
    MergeShare,
    NoKeys,
    Output,
    Partial,
    Raise,
    Take,
    Tiles,
)


def promise_of(deal: Deal) -> Promised:
    """What the reference says of the batch."""
    batch, requests = deal.batch, len(deal.batch.lengths)
    combines = batch.combines and 2 * batch.workers >= 3 * requests
    each = max(batch.workers // requests, 1) if combines else 1
    if each > 1 and not batch.fixed:
        # Where the page table's width alone would be in shares, no request has more workers than that has chunks.
        widest = promised([batch.tokens] * requests, batch.tokens, batch.workers, 0, batch.costs,
                          combines=combines, workers_each=each)  # fmt: skip
        if widest.how == "shares":
            each = sum(len(splits) for splits in widest.splits) // requests
    return promised(batch.lengths, batch.tokens, batch.workers, batch.fixed, batch.costs,
                    combines=combines, workers_each=each)  # fmt: skip


def how_of(deal: Deal) -> str:
    """How a batch is dealt: `chunks`, `even`, `shares` or `whole`."""
    if deal.batch.fixed:
        return "chunks"
    if deal.line.lead > 0:
        return "even"
    return "shares" if deal.room.scheduler.in_shares(deal.line, deal.pool.fixed) else "whole"


def check_promise(deal: Deal) -> None:
    """Every worker has the splits that the reference deals to it, in its order."""
    promise = promise_of(deal)
    assert how_of(deal) == promise.how
    for worker, (splits, promised_ones) in enumerate(zip(deal.dealt, promise.splits, strict=True)):
        assert splits == promised_ones, f"worker {worker} has {splits}, and is promised {promised_ones}"


def check_tiles(deal: Deal) -> None:
    """Every KV tile of every request is computed by exactly one worker, and zeros are written once for each request
    without keys."""
    computed: dict[int, list[tuple[int, int]]] = {}
    keyless: Counter[int] = Counter()
    for steps in deal.all_steps:
        for step in steps:
            if isinstance(step, Tiles):
                assert step.first < step.end
                computed.setdefault(step.request, []).append((step.first, step.end))
            elif isinstance(step, NoKeys):
                keyless[step.request] += 1
    for request, units in enumerate(deal.batch.units):
        parts = sorted(computed.pop(request, []))
        ends = [0, *(end for _, end in parts)]
        assert [first for first, _ in parts] == ends[:-1], f"request {request}: {parts}"
        assert ends[-1] == units, f"request {request} of {units} tiles: {parts}"
        assert keyless[request] == (units == 0), f"request {request}: zeros are written {keyless[request]} times"
    assert not computed


def check_even(deal: Deal) -> None:
    """Shares are as even as the scheduler says.

    even    No worker has more than span = ceil((tiles + overhead · requests with keys) / workers) tiles, under one more
            than the mean, nor more than span + overhead where each of its splits is charged the overhead: that of a
            request that began with the worker before is paid twice. A request is cut only where a worker ends.
    whole   No worker has more than ceil(requests / workers) requests, and none is cut.
    shares  No worker has more than one split; those of a request are equal, but for a shorter last one.
    chunks  Every split has as many tiles as the caller fixed, but for the last one of a request, and no worker has more
            than ceil(chunks / workers) of them.

    In the first three no worker is slower than the slowest would be if no request were cut.
    """
    batch, costs, how = deal.batch, deal.batch.costs, how_of(deal)
    units, dealt = batch.units, deal.dealt
    sizes = [[end - first for _, first, end in splits] for splits in dealt]
    if how == "even":
        span = max(1, up(sum(units) + costs.overhead * sum(n > 0 for n in units), batch.workers))
        for splits, tiles in zip(dealt, sizes, strict=True):
            assert sum(tiles) <= span, f"{sum(tiles)} tiles of a worker, over {span}"
            charged = sum(tiles) + costs.overhead * len(tiles)
            assert charged <= span + costs.overhead, f"{charged} of a worker, over {span} + {costs.overhead}"
            assert all(end == units[request] for request, _, end in splits[:-1])
            assert all(first == 0 for _, first, _ in splits[1:])
    elif how == "whole":
        assert max(len(splits) for splits in dealt) <= up(len(units), batch.workers)
        assert all((first, end) == (0, units[request]) for splits in dealt for request, first, end in splits)
    else:
        of_requests: list[list[int]] = [[] for _ in units]
        for splits in dealt:
            for request, first, end in splits:
                of_requests[request].append(end - first)
        for number, tiles in zip(units, of_requests, strict=True):
            step = batch.fixed or max(tiles)
            assert all(size == step for size in tiles[:-1]) and tiles[-1] <= step
            assert tiles[-1] > 0 or number == 0
        most = up(sum(len(tiles) for tiles in of_requests), batch.workers) if how == "chunks" else 1
        assert max(len(splits) for splits in dealt) <= most
        if how == "shares":
            each = deal.pool.shares
            assert each <= max(batch.workers // len(units), 1)
            assert all(max(tiles) == max(1, up(n, each)) or n == 0 for n, tiles in zip(units, of_requests, strict=True))
    if how != "chunks":
        slowest = max(sum(tiles) + costs.overhead * len(tiles) for tiles in sizes)
        assert slowest <= up(len(units), batch.workers) * (max(units) + costs.overhead)


def check_waits(deal: Deal) -> None:
    """Nobody waits in a circle.

    The graph has a node for each step of each worker, and a merge of shares has two: it says that it has come, then it
    waits. Arrows lead from a step to the next one of the worker, and to whoever waits for it. It is acyclic, every flag
    that is raised is taken once, and who takes a flag waits for a later worker, which is launched earlier.
    """
    nodes: list[tuple[int, Any]] = []
    after: list[list[int]] = []
    raised: dict[int, list[int]] = {}
    taken: dict[int, list[int]] = {}
    begun: dict[int, int] = {}
    came: dict[int, list[tuple[int, int]]] = {}  # of a shared merge: (index, node)
    counts: dict[int, int] = {}

    def add(worker: int, step: Any) -> int:
        if nodes and nodes[-1][0] == worker:
            after[-1].append(len(nodes))
        nodes.append((worker, step))
        after.append([])
        return len(nodes) - 1

    for worker, steps in enumerate(deal.all_steps):
        for step in steps:
            node = add(worker, step)
            if isinstance(step, Raise):
                raised.setdefault(step.slot, []).append(node)
            elif isinstance(step, Take):
                taken.setdefault(step.slot, []).append(node)
            elif isinstance(step, BeginShares):
                assert step.base not in begun
                begun[step.base] = node
            elif isinstance(step, MergeShare):
                base = step.slot - step.split_index.index
                came.setdefault(base, []).append((step.split_index.index, node))
                counts[base] = step.split_index.count
                add(worker, "waits")
    assert came.keys() == begun.keys(), "a merge of shares that its first worker does not begin, or nobody does"
    for base, who in came.items():
        assert [index for index, _ in sorted(who)] == list(range(counts[base] - 1)), "not all but the last one merge"
        tells = [begun[base], *raised.pop(base, []), *(node for _, node in who)]
        assert len(tells) == counts[base] + 1, "not all say that their partial result is there"
        for _, node in who:
            for told in tells:
                after[told].append(node + 1)
    assert raised.keys() == taken.keys(), "a flag that nobody takes, or that nobody raises"
    for slot, waiting in taken.items():
        assert len(waiting) == len(raised[slot]) == 1, f"flag {slot} is raised or taken more than once"
        (who_takes,), (who_raises,) = waiting, raised[slot]
        assert nodes[who_takes][0] < nodes[who_raises][0], "waits for a worker that is launched later"
        after[who_raises].append(who_takes)
    missing = Counter(node for following in after for node in following)
    ready = [node for node in range(len(nodes)) if not missing[node]]
    done = 0
    while ready:
        done += 1
        for node in after[ready.pop()]:
            missing[node] -= 1
            if not missing[node]:
                ready.append(node)
    left = [nodes[node] for node, number in missing.items() if number > 0]
    assert done == len(nodes), f"these wait in a circle, or behind one: {left[:6]}"


def combine_reads(deal: Deal) -> dict[int, list[int]] | None:
    """(request: slots in order) of what a combine merges, by the mode word and the table that the attention wrote; None
    where none is launched."""
    scheduler, combine, pool, batch = deal.room.scheduler, deal.room.combine, deal.pool, deal.batch
    requests = len(batch.lengths)
    table = of_values([-1] * (2 * (requests + 1)))
    for step in (step for steps in deal.all_steps for step in steps):
        if isinstance(step, Listed):
            assert table[2 * step.request] == -1, f"request {step.request} is listed twice"
            deal.room.partials.list_request(table, step.request, step.count, step.base)
    combine.write_split_kind(table, deal.line, scheduler.are_as_long(deal.lengths, batch.tokens, 0, batch.costs), pool)
    mode, width = table[2 * requests], pool.shares
    if pool.combined == 0:
        assert mode == combine.MERGED
        return None
    entries = dict.fromkeys(range(requests), (0, 0))
    for request in entries:
        if mode == combine.FULL:
            entries[request] = width, request * width
        elif mode == combine.SHARES:
            _, shares = scheduler.split_evenly(batch.units[request], width)
            entries[request] = shares, request * width
        elif mode == combine.LISTED:
            entries[request] = table[2 * request], table[2 * request + 1]
            assert entries[request][0] >= 0, f"request {request} is not listed"
    return {r: list(range(base, base + count)) for r, (count, base) in entries.items() if count > 1}


def check_workspaces(deal: Deal) -> None:
    """Slots of partial results, flags and entries of the table are inside what the host allocates; no slot is written
    twice; and who merges a request reads the slots that its splits wrote, in their order."""
    scheduler, batch = deal.room.scheduler, deal.batch
    requests = len(batch.lengths)
    slots = scheduler.most_slots(requests, batch.workers, batch.table_units, batch.fixed)
    flags = requests + batch.workers  # as `decode_host.decode_kernel` has it, for each query tile
    written: dict[int, list[tuple[int, int]]] = {}  # request: (first tile, slot)
    outputs: Counter[int] = Counter()
    used: Counter[int] = Counter()
    merged: dict[int, list[int]] = {}
    for steps in deal.all_steps:
        first = -1
        for step in steps:
            if isinstance(step, Tiles):
                first = step.first
            elif isinstance(step, Partial):
                assert 0 <= step.slot < slots, f"slot {step.slot} of {slots}"
                used[step.slot] += 1
                written.setdefault(step.request, []).append((first, step.slot))
            elif isinstance(step, (Raise, Take)):
                assert 0 <= step.slot < flags, f"flag {step.slot} of {flags}"
            elif isinstance(step, BeginShares):
                assert 0 <= step.base < flags, f"flag {step.base} of {flags}"
            elif isinstance(step, Listed):
                assert 0 <= step.request < requests
            elif isinstance(step, (Output, NoKeys)):
                outputs[step.request] += 1
            elif isinstance(step, MergeShare):
                base = step.slot - step.split_index.index
                read_slots = range(base, base + step.split_index.count)
                assert base >= 0 and read_slots.stop <= slots, f"slots {base} to {read_slots.stop} of {slots}"
                assert merged.setdefault(step.request, list(read_slots)) == list(read_slots)
    assert all(number == 1 for number in used.values()), "a slot is written twice"
    read = combine_reads(deal)
    whose = merged if read is None else read
    for request in range(requests):
        own = [slot for _, slot in sorted(written.get(request, []))]
        if request in whose:
            assert own == whose[request], f"request {request}: {own} are written, {whose[request]} are read"
            assert outputs[request] == 0, f"request {request} is written by who merges it and by a split"
        else:
            assert outputs[request] == 1, f"request {request} is written {outputs[request]} times"
            assert read is None or not own, f"nobody merges {own} of request {request}"


def check_order(deal: Deal) -> None:
    """A worker goes through the requests in their order, and through each once."""
    for splits in deal.dealt:
        assert all(before[0] < behind[0] for before, behind in pairwise(splits)) or deal.batch.fixed
        assert splits == sorted(splits)


CHECKS = (check_promise, check_tiles, check_even, check_waits, check_workspaces, check_order)
