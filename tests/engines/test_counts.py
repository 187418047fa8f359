"""In which steps sparse decode is told how many indices count."""

import pytest

from mla_var3.engines.counts import pays


@pytest.mark.parametrize(
    ("tokens", "heads", "told"),
    [
        (1, 128, False), (64, 16, False), (95, 64, False), (96, 16, True), (96, 64, True), (47, 128, False),
        (48, 128, True), (32, 129, True), (2048, 8, True),
    ],
)  # fmt: skip
def test_counts_are_told_from_96_query_tiles_on(tokens: int, heads: int, told: bool) -> None:
    assert pays(tokens, heads) is told
