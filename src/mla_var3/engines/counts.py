"""When sparse decode is told how many indices of each row count."""

from __future__ import annotations

#: Heads of a query tile, and query tiles of a step from which on the counts pay.
HEADS, TILES = 64, 96


def pays(tokens: int, heads: int) -> bool:
    """Whether the counts pay in a step of so many query tokens, a row of indices each. The host knows both numbers, and
    a captured graph has them fixed.

    The kernel deals rows out by their counts then, in place of rows that are all full. From 96 query tiles on that
    takes 17 % and more off a step of short contexts, and costs one of full rows 2 to 3 %. In smaller steps workers
    share each row already, and reading the counts and finding a first split by them costs up to 38 %.
    """
    return tokens * -(-heads // HEADS) >= TILES
