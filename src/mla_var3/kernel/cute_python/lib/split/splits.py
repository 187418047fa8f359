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
