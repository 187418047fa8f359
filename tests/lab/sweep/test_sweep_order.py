"""The order of a sweep's cells, and what its parts are made of."""

from __future__ import annotations

import pytest

from mla_var3.errors import UserError
from mla_var3.lab.sweep import config as sweep_config
from mla_var3.lab.sweep import plan as sweep_plan


def test_an_even_order_deals_equal_parts_and_begins_evenly() -> None:
    listed = sweep_plan.expand_cells(sweep_config.compose(["experiment=regime_map", "experiment.order=listed"]))
    words = ["experiment=regime_map", "experiment.order=even"]
    whole = sweep_plan.expand_cells(sweep_config.compose(words))
    assert whole != listed and sorted(c.label for c in whole) == sorted(c.label for c in listed)
    parts = [sweep_plan.expand_cells(sweep_config.compose([*words, f"part={k}/4"])) for k in range(1, 5)]
    assert sorted(c.label for part in parts for c in part) == sorted(c.label for c in whole)
    work = [
        [sum(sweep_plan._work(c) for c in cells) for cells in some]
        for some in (parts, [listed[k::4] for k in range(4)])
    ]
    assert max(work[0]) < 2 * min(work[0]) and max(work[1]) > 3 * min(work[1]), "the few large cells are shared out"
    for part in parts:
        third = part[: len(part) // 3]
        assert {c.h for c in third} == {c.h for c in listed} and {c.t for c in third} >= {512, 2048, 8192, 32768}
        assert {c.s > 1 for c in third} == {True, False}
    with pytest.raises(UserError, match=r"experiment.order = 'evn' is unknown: did you mean 'even'"):
        sweep_config.compose(["experiment=regime_map", "experiment.order=evn"])
