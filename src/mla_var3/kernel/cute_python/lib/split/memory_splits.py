"""How many parts to cut each request's keys into when memory is the limit. No GPU and no compiler needed."""

from __future__ import annotations

# Microseconds on an H200, read off flash_mla_v2; the bytes a microsecond are an estimate.
TILE_SHARE_US = 0.0159  # 64 tokens of 1152 bytes at 4.64 TB/s, the whole chip on one tile
TILE_LEAST_US = 1.3  # a tile of a block that has the memory to itself (1.1 to 1.4 measured)
ITEM_US = 9.0  # launch, start and end of a work item, on a chip where all blocks start together (7 to 9 measured)
MERGE_US = 4.0
MERGE_BYTES_PER_US = 3.0e6
MAX_SPLITS = 256


def choose_splits(blocks: int, tiles: int, query_rows: int, columns: int, num_sms: int) -> int:
    """The number of splits with the least modelled time.

    blocks: work items without a split, over all requests. tiles: of 64 tokens in the longest request. query_rows: over
    all requests, each `columns` wide (their fp32 partials are written and read).
    """

    def cost(splits: int) -> float:
        per_split = -(-tiles // splits)
        waves = -(-blocks * splits // num_sms)
        time = max(blocks * tiles * TILE_SHARE_US, waves * per_split * TILE_LEAST_US) + waves * ITEM_US
        if splits > 1:
            time += MERGE_US + 8.0 * query_rows * columns * splits / MERGE_BYTES_PER_US
        return time

    return min(range(1, max(1, min(tiles, MAX_SPLITS)) + 1), key=cost)
