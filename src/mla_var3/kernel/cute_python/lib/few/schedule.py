"""Into how many splits, and clusters of them, to cut requests whose splits are joined in the kernel. Needs no GPU."""

from __future__ import annotations

MAX_SPLITS = 256

# Blocks of one cluster size that an H200 with 132 SMs ran at once when a block took a whole SM, from the driver's
# occupancy query. A cluster stays in one GPC, and GPCs differ in size: one more block is a second wave.
AT_ONCE = {1: 132, 2: 132, 3: 117, 4: 120, 8: 120}
MEASURED_SMS = 132

# Microseconds read off an H200. The last cluster of an item reads what all of them left: a trace showed 2 to 5.
JOIN_US = 3.4
GROUPS_US = 2.0
GROUP_US = 0.15
WAVE_US = 4.0


def clusters_of(splits: int) -> int:
    """The largest cluster that divides the splits."""
    return max(c for c in AT_ONCE if splits % c == 0)


def blocks_at_once(cluster: int, num_sms: int) -> int:
    """How many blocks, of clusters of this size, a chip runs at once."""
    return AT_ONCE[cluster] * num_sms // MEASURED_SMS // cluster * cluster


def choose_splits(items: int, tiles: int, num_sms: int, *, tile_us: float, least_us: float) -> int:
    """The number of splits with the least modelled time.

    items: work items without a split (row tiles, kv heads, requests). tiles: of the longest request. tile_us: a tile
    when the whole chip reads; least_us: a tile of a block that has the memory to itself.
    """

    def cost(splits: int) -> float:
        cluster = clusters_of(splits)
        blocks = items * splits
        waves = -(-blocks // blocks_at_once(cluster, num_sms))
        per_split = -(-tiles // splits)
        time = max(blocks * per_split * tile_us, waves * per_split * least_us) + (waves - 1) * WAVE_US
        if splits > 1:
            time += JOIN_US
        if splits > cluster:
            # What the last one reads grows with the groups and shrinks with the blocks that share it.
            time += GROUPS_US + GROUP_US * splits / cluster * 8 / cluster
        return time

    return min(range(1, max(1, min(tiles, MAX_SPLITS)) + 1), key=cost)
