"""cute-dsl/flash_mla without a GPU: what it compiles to, what it refuses, and how it splits."""

from __future__ import annotations

import pytest
from compiled import compiled

from mla_var3.device import Device
from mla_var3.errors import Unsupported
from mla_var3.lab.sweep.plan import own_knobs
from mla_var3.workload.decode import MlaProblem

pytest.importorskip("cutlass", reason="nvidia-cutlass-dsl is not installed")

from mla_var3.kernel.cute_python.mla.flash_mla.flash_mla.flash_mla import (
    FlashMlaPlan,
    FlashMlaTiling,
    Geometry,
    choose_splits,
)

H200 = Device.get("h200")


def test_compiles_without_spills_on_the_fast_path() -> None:
    plan = FlashMlaPlan(MlaProblem(h=128, t=512), FlashMlaTiling(num_splits=2), H200)
    main, combine = compiled(plan).stages
    assert (main.resources.registers, main.resources.spill_bytes, main.resources.stack_bytes) == (168, 0, 0)
    assert main.resources.threads == 384
    # 2 x (2 x 36) for the scores, prologue and loop; 2 x 2 x 8 for the values, loop and last pair
    assert main.resources.instructions["HGMMA"] == 176
    assert main.resources.instructions["UTMALDG"] == 18
    assert "cutlass" not in main.name
    assert combine.resources.spill_bytes == 0


@pytest.mark.parametrize(
    ("fields", "word"),
    [
        ({"k": 500}, "k = 500"),
        ({"p": 32}, "p = 32"),
        ({"page": 48}, "48"),
        ({"dtype": "fp32"}, "fp32"),
    ],
)
def test_refuses_with_a_reason(fields: dict[str, object], word: str) -> None:
    with pytest.raises(Unsupported, match=word):
        FlashMlaPlan(MlaProblem(**fields), None, H200).require()


def test_knobs_that_a_record_has_and_the_version_had_are_left_out() -> None:
    old = {"tile_m": 64, "tile_n": 64, "num_warpgroups": 3, "num_pipeline_stages": 2, "num_splits": 4}
    assert own_knobs(FlashMlaPlan, old) == {"num_splits": 4}


def test_tiling_says_why_not() -> None:
    assert "num_splits" in FlashMlaTiling(num_splits=-1).validate(MlaProblem(), H200).reason
    smaller = Device.get("a100") if any(d.key == "a100" for d in Device.all()) else None
    if smaller is not None:
        assert "shared memory" in FlashMlaTiling().validate(MlaProblem(), smaller).reason


def test_every_panel_is_freed_by_exactly_one_consumer() -> None:
    for k in (128, 256, 384, 512):
        geometry = Geometry(128, 1, 1, k, 64, 64, False)
        for stage in (0, 1):
            freed = [*geometry.freed_by(stage, 0), *geometry.freed_by(stage, 1)]
            assert sorted(freed) == list(range(geometry.panels))
            assert geometry.rope in geometry.freed_by(stage, 1 - stage)
        assert FlashMlaTiling().validate(MlaProblem(k=k), H200)


def test_splits_fill_the_chip_only_when_it_is_not_full() -> None:
    assert choose_splits(256, 32, 128 * 128, 512, 132) == 1
    assert choose_splits(2, 512, 128, 512, 132) == 64
    assert choose_splits(1, 1, 16, 512, 132) == 1
