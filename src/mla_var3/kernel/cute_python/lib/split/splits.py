"""How many parts to cut each request's keys into, from a small model of the time. No GPU and no compiler needed."""

from __future__ import annotations

# Microseconds on an H200. PAIR_US is read off flash_mla: 266 us for 64 pairs of tiles in turn on each SM (b = 128,
# h = 128, t = 4096), block start and end included. The others are estimates that were not measured one by one; the
# tuner measures whole tilings where the choice matters.
PAIR_US = 4.1
BLOCK_US = 5.0
COMBINE_US = 4.0
COMBINE_BYTES_PER_US = 3.0e6
MAX_SPLITS = 256


def choose_splits(row_tiles: int, pairs: int, query_rows: int, columns: int, num_sms: int) -> int:
    """The number of splits with the least modelled time.

    row_tiles: blocks of the unsplit grid, over all requests. pairs: of 64-token tiles in the longest request.
    query_rows: over all requests, each `columns` wide (their fp32 partials are written and read).
    """

    def cost(splits: int) -> float:
        per_split = -(-pairs // splits)
        used = -(-pairs // per_split)
        waves = -(-row_tiles * used // num_sms)
        time = waves * (per_split * PAIR_US + BLOCK_US)
        if splits > 1:
            time += COMBINE_US + 8.0 * query_rows * columns * used / COMBINE_BYTES_PER_US
        return time

    return min(range(1, max(1, min(pairs, MAX_SPLITS)) + 1), key=cost)


# The same for parts as `lib.latent.fragments` stores them, the shortest of one tile. Fitted to 72 problems with 16 and
# 128 heads, 1 to 32 requests and 512 to 32768 tokens on an H200, each in up to 7 numbers of parts
# (results/h200/traces/2026-11-22-flash_mla_v10.txt): of those, the model picks the fastest for every problem.
SHORT_PAIR_US = 2.45
SHORT_TILE_US = 1.2
SHORT_BLOCK_US = 4.0
SHORT_COMBINE_US = 1.0
SHORT_BYTES_PER_US = 5.0e6


def choose_short_splits(row_tiles: int, tiles: int, query_rows: int, columns: int, num_sms: int) -> int:
    """`choose_splits` where a part may be a single tile, and its elements take 2 bytes to write and 2 to read."""

    def cost(splits: int) -> float:
        if splits >= tiles:
            used, steps = tiles, SHORT_TILE_US
        else:
            pairs = -(-tiles // 2)
            each = -(-pairs // splits)
            used, steps = -(-pairs // each), each * SHORT_PAIR_US
        time = -(-row_tiles * used // num_sms) * (steps + SHORT_BLOCK_US)
        if splits > 1:
            time += SHORT_COMBINE_US + 4.0 * query_rows * columns * used / SHORT_BYTES_PER_US
        return time

    return min(range(1, max(1, min(tiles, MAX_SPLITS)) + 1), key=cost)
