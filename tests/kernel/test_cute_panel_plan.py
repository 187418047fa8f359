"""What the versions with `lib.swapped.plan.PanelPlan` refuse, without a GPU."""

from __future__ import annotations

from typing import Any

import pytest

from mla_var3.device import Device
from mla_var3.errors import Infeasible, Unsupported
from mla_var3.problem import MlaProblem

pytest.importorskip("cutlass", reason="nvidia-cutlass-dsl is not installed")

from mla_var3.kernel.cute_python.mla.flash_mla.flash_mla_v9.flash_mla_v9 import FlashMlaV9Plan
from mla_var3.kernel.cute_python.mla.flash_mla.flash_mla_v11.flash_mla_v11 import FlashMlaV11Plan
from mla_var3.kernel.cute_python.mla.flash_mla.flash_mla_v13.flash_mla_v13 import FlashMlaV13Plan
from mla_var3.kernel.cute_python.mla.flash_mla.flash_mla_v14.flash_mla_v14 import FlashMlaV14Plan
from mla_var3.kernel.cute_python.mla.flash_mla.flash_mla_v18.flash_mla_v18 import FlashMlaV18Plan

H200 = Device.get("h200")
PLANS = pytest.mark.parametrize(
    "plan", [FlashMlaV9Plan, FlashMlaV11Plan, FlashMlaV13Plan, FlashMlaV14Plan, FlashMlaV18Plan]
)


@PLANS
@pytest.mark.parametrize(
    ("fields", "word"),
    [({"k": 500}, "k = 500"), ({"p": 32}, "p = 32"), ({"page": 48}, "48"), ({"n": 64}, "n = 64"),
     ({"h": 64}, "flash_mla_v8"), ({"h": 16, "s": 3}, "flash_mla_v8"), ({"dtype": "fp32"}, "fp32")],
)  # fmt: skip
def test_refuses_with_a_reason(plan: Any, fields: dict[str, Any], word: str) -> None:
    with pytest.raises(Unsupported, match=word):
        plan(MlaProblem(**{"h": 16, **fields}), None, H200).require()


@PLANS
@pytest.mark.parametrize(
    ("fields", "word"),
    [({"tile_n": 24}, "tile_n = 24"), ({"tile_n": 8}, "16 query rows"), ({"num_splits": 257}, "num_splits"),
     ({"num_pipeline_stages": 17}, "9 of a tile for each of 2"), ({"num_pipeline_stages": 40}, "shared memory")],
)  # fmt: skip
def test_tiling_says_why_not(plan: Any, fields: dict[str, int], word: str) -> None:
    tiling = plan.tiling_type(**fields)
    assert word in tiling.validate(MlaProblem(h=16), H200).reason
    with pytest.raises(Infeasible):
        plan(MlaProblem(h=16), tiling, H200).require()
