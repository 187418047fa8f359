"""cute-dsl/flash_mla_v5 without a GPU: what it compiles to, what its parts look like, what it refuses."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from reading_sass import overwritten_operands

from mla_var3.device import Device
from mla_var3.problem import MlaProblem

pytest.importorskip("cutlass", reason="nvidia-cutlass-dsl is not installed")

import torch

from mla_var3.kernel.cute_python.lib.split.combine_rows import most_splits, num_groups, rows_together
from mla_var3.kernel.cute_python.mla.flash_mla.flash_mla_v3.flash_mla_v3 import FlashMlaV3Plan
from mla_var3.kernel.cute_python.mla.flash_mla.flash_mla_v5.flash_mla_v5 import FlashMlaV5Plan, FlashMlaV5Tiling

if TYPE_CHECKING:
    from pathlib import Path

H200 = Device.get("h200")


@pytest.mark.parametrize("h", [128, 16])
def test_compiles_without_spills(tmp_path: Path, h: int) -> None:
    plan = FlashMlaV5Plan(MlaProblem(h=h, t=512), FlashMlaV5Tiling(num_splits=2), H200)
    main, combine = plan.plan_empty().compile(tmp_path, H200, keep=("sass", "ptx")).stages
    assert (main.resources.registers, main.resources.spill_bytes, main.resources.stack_bytes) == (168, 0, 0)
    assert (main.resources.threads, main.warnings) == (384, ())
    assert main.resources.instructions["HGMMA"] == 184  # flash_mla_v3's
    assert (combine.name, combine.resources.spill_bytes) == ("combine_rows2", 0)
    assert overwritten_operands(main.artefacts["sass"].read_text()) == []
    # A request is worked on by one cluster, longest requests first: found with warp-wide sums, not with a sort.
    assert "redux.sync.add" in main.artefacts["ptx"].read_text()


def test_one_ending_is_less_code(tmp_path: Path) -> None:
    problem = MlaProblem(h=128, t=512)
    plain = FlashMlaV5Plan(problem, FlashMlaV5Tiling(longest_first=False), H200).plan_empty().compile(tmp_path, H200)
    before = FlashMlaV3Plan(problem, None, H200).plan_empty().compile(tmp_path, H200)
    assert plain.resources.instructions["STG"] < before.resources.instructions["STG"] // 4
    assert plain.resources.instructions["total"] < before.resources.instructions["total"] - 500


def test_parts_are_laid_out_as_the_output_is() -> None:
    plan = FlashMlaV5Plan(MlaProblem(b=3, s=2, h=16, h_kv=2, t=512), None, H200)
    q = torch.zeros(3, 2, 16, 576, dtype=torch.bfloat16)
    parts = plan.partials(q, 4)
    assert [tuple(x.shape) for x in parts] == [(4, 3, 2, 16, 512), (4, 3, 16, 2, 4)]
    assert [x.dtype for x in parts] == [torch.float16, torch.float32]
    outputs = (q[..., :512].contiguous(), torch.zeros(3, 16, 2))
    assert plan.results(outputs, parts, 1) is outputs
    flat = plan.results(outputs, parts, 4)
    assert [tuple(x.shape) for x in flat] == [(12, 2, 16, 512), (12, 16, 8)]
    assert flat[0].dtype is torch.bfloat16
    assert all(a.data_ptr() == b.data_ptr() for a, b in zip(flat, parts, strict=True))


@pytest.mark.parametrize(
    ("b", "h", "t", "parts"),
    [(128, 128, 8192, 1), (64, 128, 8192, 2), (128, 64, 8192, 2), (128, 16, 8192, 2), (32, 128, 16384, 4)],
)
def test_unequal_requests_are_cut_as_measurements_want(b: int, h: int, t: int, parts: int) -> None:
    ragged = MlaProblem(b=b, h=h, t=t, lengths={"name": "ragged", "seed": 1})
    assert FlashMlaV5Plan(ragged, None, H200).num_splits(b, ragged.max_pages) == parts


def test_binding_keeps_what_is_known_of_the_lengths() -> None:
    plan = FlashMlaV5Plan(MlaProblem(b=64, t=8192, lengths={"name": "ragged", "seed": 1}), None, H200)
    inputs = [torch.zeros(64, 1, 128, 576, dtype=torch.bfloat16), torch.zeros(1, 64, 1, 576, dtype=torch.bfloat16)]
    inputs += [torch.zeros(64, 128, dtype=torch.int32), torch.zeros(64, dtype=torch.int32)]
    bound = plan.rebind(*inputs)
    assert bound.problem.lengths == "uniform"
    assert bound.num_splits(64, 128) == plan.num_splits(64, 128) == 2


def test_equal_requests_are_cut_as_before() -> None:
    equal = MlaProblem(b=64, h=128, t=8192)
    before = FlashMlaV3Plan(equal, None, H200).num_splits(64, equal.max_pages)
    assert FlashMlaV5Plan(equal, None, H200).num_splits(64, equal.max_pages) == before
    asked = FlashMlaV5Plan(equal.replace(lengths={"name": "ragged", "seed": 1}), FlashMlaV5Tiling(num_splits=7), H200)
    assert asked.num_splits(64, equal.max_pages) == 7


@pytest.mark.parametrize("splits", [1, 2, 3, 4, 5, 8, 9, 16, 17, 32, 33, 256])
def test_groups_of_the_combine_fit_a_block(splits: int) -> None:
    most = most_splits(splits)
    assert splits <= most
    assert num_groups(most) * rows_together(most) * (512 // 8) <= 1024
    assert rows_together(most) == 1 or num_groups(most) == 1  # the groups' sums have room for one row
    assert most <= 16 * num_groups(most)


@pytest.mark.parametrize(
    ("problem", "fields", "word"),
    [
        ({}, {"tile_n": 128}, "128"),
        ({}, {"num_splits": 257}, "256"),
        ({}, {"longest_first": 3}, "True or False"),
        ({"k": 128}, {}, "256"),
    ],
)
def test_says_why_not(problem: dict[str, int], fields: dict[str, int], word: str) -> None:
    pd = MlaProblem(**problem)
    verdict = FlashMlaV5Tiling(**fields).validate(pd, H200)
    assert word in (verdict.reason or FlashMlaV5Plan.requires.problem(pd).reason)
