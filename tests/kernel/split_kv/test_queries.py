"""Packed queries: `rows.cut_queries` on an emulated CTA."""

from __future__ import annotations

from typing import Any

from device_on_cpu import WARP, Pointer, Room, make_layout, make_tensor, of_values, run_cta
from hypothesis import given, settings
from hypothesis import strategies as st

ROOM = Room()
UNTOUCHED = -7


@st.composite
def packed(draw: Any) -> tuple[list[int], list[int]]:
    """(query tokens, keys) of each request: none, one, a prompt of hundreds among decodes."""
    count = st.sampled_from([0, 1, 2, 3, 7]) | st.integers(0, 20) | st.integers(100, 300)
    counts = draw(st.lists(count, min_size=1, max_size=6) | st.lists(st.integers(0, 3), min_size=60, max_size=140))
    extra = draw(st.lists(st.sampled_from([0, 0, 5, 900]), min_size=len(counts), max_size=len(counts)))
    has_keys = draw(st.lists(st.integers(0, 4), min_size=len(counts), max_size=len(counts)))
    keys = [n + more if some else 0 for n, more, some in zip(counts, extra, has_keys, strict=True)]
    return counts, keys


def cut(counts: list[int], keys: list[int], tokens: int, warps: int, causal: bool) -> tuple[list[list[int]], list[int]]:
    """(blocks, the combine's table) that a CTA writes, in the workspace that a host allocates for them."""
    rows, scheduler = ROOM.rows, ROOM.scheduler
    offsets = [sum(counts[:i]) for i in range(len(counts) + 1)]
    most = rows.most_blocks(offsets[-1], len(counts), tokens)
    words = of_values([UNTOUCHED] * scheduler.schedule_words(most, 3, True))
    schedule = scheduler.schedule_in(words, 3, True)
    assert schedule.blocks.shape == (most, rows.BLOCK) and schedule.table.shape == (2 * (most + 1),)
    work = (of_values(offsets), of_values(keys), schedule.blocks, schedule.table, warps, tokens, causal)
    run_cta(lambda: rows.cut_queries(*work), warps * WARP)
    assert set(words.values()[: 3 * scheduler.FIRST_WORDS]) == {UNTOUCHED}, "blocks lie over the workers' plans"
    assert schedule.lengths(of_values(keys)).values() == [schedule.blocks[i, 3] for i in range(most)]
    return [[schedule.blocks[i, j] for j in range(rows.BLOCK)] for i in range(most)], schedule.table.values()


@settings(max_examples=20, deadline=None, derandomize=True)
@given(packed(), st.sampled_from([1, 2, 3, 16, 128]), st.sampled_from([1, 2]), st.booleans())
def test_every_query_token_is_in_exactly_one_block(
    batch: tuple[list[int], list[int]], tokens: int, warps: int, causal: bool
) -> None:
    counts, keys = batch
    blocks, table = cut(counts, keys, tokens, warps, causal)
    of_tokens = [request for request, count in enumerate(counts) for _ in range(count)]
    seen, keyless = [0] * len(of_tokens), False
    for index, (first, count, request, sees) in enumerate(blocks):
        assert 0 <= count <= tokens
        last = first + count - 1
        for token in range(first, first + count):
            seen[token] += 1
            assert of_tokens[token] == request
        begin = sum(counts[:request])
        # A full block, but for the last one of a request; and those past the last one have no tokens and no keys.
        assert count == tokens or count == 0 or first + count == begin + counts[request]
        after = begin + counts[request] - 1 - last if causal else 0
        assert sees == (max(keys[request] - after, 0) if count else 0)
        if sees <= 0:
            assert table[2 * index : 2 * index + 2] == [0, 0], f"block {index} without keys is not listed"
            keyless |= count > 0
    assert all(number == 1 for number in seen)
    assert table[-1] == keyless
    assert table[-2] == UNTOUCHED, "the mode word is the attention kernel's"


def test_blocks_past_the_workspace_are_not_written() -> None:
    """A caller's tensors may name more query tokens than q has: nothing beyond the blocks' memory changes."""
    rows, most, warps = ROOM.rows, 2, 1
    memory = [UNTOUCHED] * 100
    blocks = make_tensor(Pointer(memory), make_layout((most, rows.BLOCK), stride=(rows.BLOCK, 1)))
    table = make_tensor(Pointer(memory, 50), make_layout(2 * (most + 1)))
    work = (of_values([0, 40]), of_values([0]), blocks, table, warps, 4, True)
    run_cta(lambda: rows.cut_queries(*work), warps * WARP)
    assert memory[most * rows.BLOCK : 50] == [UNTOUCHED] * (50 - most * rows.BLOCK)
    assert memory[50 + 2 * (most + 1) :] == [UNTOUCHED] * (50 - 2 * (most + 1))
