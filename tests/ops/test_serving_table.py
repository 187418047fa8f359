"""docs/serving.md's table of what is supported where, against what the versions themselves say."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mla_var3.catalogue import registry
from mla_var3.device import Device
from mla_var3.dispatch import choose
from mla_var3.dispatch.selection import NOT_SERVED
from mla_var3.errors import Unsupported
from mla_var3.lab.naming import cell_name
from mla_var3.workload.decode import MlaProblem
from mla_var3.workload.prefill import PrefillProblem

Cell = tuple[dict[str, Any], str]


def here(*fields: dict[str, Any]) -> list[Cell]:
    return [(each, "h200") for each in fields]


def pages(*sizes: int) -> list[Cell]:
    return here(*({"page": size} for size in sizes))


def widths(*sizes: tuple[int, int]) -> list[Cell]:
    return here(*({"k": k, "p": p} for k, p in sizes))


def packed(*heads: int) -> list[Cell]:
    return here(*({"h": h, "queries": counts} for h in heads for counts in ([1, 1, 1, 1], [3, 0, 70, 1])))


def trees(*sizes: tuple[int, int]) -> list[Cell]:
    return here(*({"h": h, "s": s, "tree": True} for h, s in sizes))


# What the first column says, in problems and devices: every one of them must agree with the row.
ROWS: dict[str, list[Cell]] = {
    "pages of 64, 128, 256, .. tokens": pages(64, 128, 256, 1024),
    "pages of other multiples of 64": pages(192, 320, 576),
    "pages of 16, 32": pages(16, 32),
    "pages of other multiples of 16": pages(48, 80, 96, 272),
    "pages of 1": pages(1),
    "pages of 2 to 15": pages(*range(2, 16)),
    "pages of any other number": pages(17, 24, 63, 65, 100),
    "pages further apart than they are long": here(*({"strided_pages": True, "page": n} for n in (1, 16, 64, 128))),
    "strided views without a copy ([strides](#strides))": here({"strided": True}, {"strided_out": True, "s": 2}),
    "512 + 64 columns": widths((512, 64)),
    "256 + 64": widths((256, 64)),
    "512 + 32, 256 + 32": widths((512, 32), (256, 32)),
    "512 + 0, 256 + 0": widths((512, 0), (256, 0)),
    "128 + 64": widths((128, 64)),
    "384 + 64": widths((384, 64)),
    "128 + 32": widths((128, 32)),
    "512 + 48": widths((512, 48)),
    "128 + 0": widths((128, 0)),
    "other powers of two, 16 to 512": widths((16, 16), (64, 64), (128, 128), (256, 128), (512, 128), (512, 512)),
    "other widths": widths((500, 64), (512, 40), (128, 8), (64, 0)),
    "up to 16 query rows of a cache (s · h / h_kv)": here({"h": 1}, {"h": 3}, {"h": 16}, {"h": 4, "s": 4}),
    "17 to 32 query rows": here({"h": 17}, {"h": 20}, {"h": 32}, {"h": 16, "s": 2}, {"h": 8, "s": 4, "causal": True}),
    "more query rows": here({"h": 33}, {"h": 64}, {"h": 128}, {"h": 256}, {"h": 16, "s": 4}, {"h": 128, "s": 2}),
    "several caches (h_kv)": here({"h": 128, "h_kv": 8}, {"h": 9, "h_kv": 3}, {"h": 16, "h_kv": 16}),
    "different query tokens a request (`cu_seqlens_q`), up to 32 heads of a cache": packed(1, 5, 16, 32),
    "the same with more heads": packed(33, 64, 128),
    "a mask of the newest tokens (`mask`), up to 32 query rows": trees((4, 8), (16, 2), (3, 5)),
    "the same with more rows": trees((16, 8), (128, 4), (20, 60)),
    "bf16, fp16": here({"dtype": "bf16"}, {"dtype": "fp16"}),
    "fp32": here({"dtype": "fp32"}),
    "Hopper (sm_90a)": [({"h": 16}, key) for key in ("h100", "h800", "h200", "h20")],
    "Ampere and Ada (sm_80, sm_86, sm_87, sm_89)": [
        ({"h": h}, key) for h in (16, 128) for key in ("a100", "a40", "rtx4090")
    ],
    "Blackwell (sm_100a, sm_120a)": [({"h": h}, key) for h in (16, 128) for key in ("rtx5090", "b200")],
}


@functools.cache
def table() -> dict[str, dict[str, str]]:
    """Row → version → yes or no."""
    text = (Path(__file__).parents[2] / "docs" / "serving.md").read_text(encoding="utf-8")
    section = text.split("## What is supported where\n")[1].split("\n## ")[0]
    lines = [[cell.strip() for cell in x.strip("|").split("|")] for x in section.splitlines() if x.startswith("|")]
    (_, *versions), _, *rows = lines
    return {name: dict(zip(versions, cells, strict=True)) for name, *cells in rows}


def versions() -> list[registry.KernelId]:
    known = (k for k in registry.all_kernels() if k.layer == "mla" and k.design in ("flash_mla", "flash_mla_mma"))
    return [k for k in known if k.language not in NOT_SERVED]


def problems(row: str) -> Iterator[tuple[MlaProblem, Device]]:
    for fields, key in ROWS[row]:
        yield MlaProblem(**{"b": 4, "h": 16, "t": 4096, **fields}), Device.get(key)


def test_the_table_has_every_version_and_the_rows_that_are_tested() -> None:
    assert list(table()) == list(ROWS)
    for row, cells in table().items():
        assert set(cells) == {k.label for k in versions()}, row
        assert set(cells.values()) <= {"yes", "no"}, row


@pytest.mark.parametrize("kernel", versions(), ids=lambda k: k.label)
@pytest.mark.parametrize("row", ROWS)
def test_a_version_takes_what_the_table_says(row: str, kernel: registry.KernelId) -> None:
    if reason := registry.missing(kernel):
        pytest.skip(reason)
    wanted = table()[row][kernel.label] == "yes"
    for problem, device in problems(row):
        plan = registry.get_plan(kernel)(problem, None, device)
        verdict = plan.supported()
        verdict = plan.feasible() if verdict else verdict
        assert bool(verdict) == wanted, f"{cell_name(problem)} on {device.key}: {verdict.reason or 'taken'}"


@pytest.mark.parametrize("row", ROWS)
def test_what_is_picked_is_a_version_with_a_yes(row: str) -> None:
    if reason := next((text for k in versions() if (text := registry.missing(k))), ""):
        pytest.skip(reason)
    taken = {label for label, cell in table()[row].items() if cell == "yes"}
    for problem, device in problems(row):
        if taken:
            assert choose(problem, device).kernel.label in taken
        else:
            with pytest.raises(Unsupported, match="no version takes"):
                choose(problem, device)


# ---------------------------------------------------------------- prompts
def dims(*sizes: tuple[int, int]) -> list[Cell]:
    """Columns of keys and of values."""
    return here(*({"d": dv, "p": dk - dv} for dk, dv in sizes))


PROMPTS: dict[str, list[Cell]] = {
    "prompts of one length": here({"s": 4096}, {"b": 1, "s": 77}),
    "prompts of different lengths, some of them empty": here({"lengths": "lognormal"}, {"lengths": [9, 0, 300, 1]}),
    "chunks behind a prefix": here({"s": 512, "t": 8192}, {"lengths": [(9, 50), (0, 7), (300, 300), (1, 2)]}),
    "192 / 128 columns": dims((192, 128)),
    "128 / 128": dims((128, 128)),
    "256 / 256": dims((256, 256)),
    "256 / 128": dims((256, 128)),
    "96 / 64": dims((96, 64)),
    "other keys up to 192 columns, in multiples of 16, with values of 64 or 128": dims(
        (64, 64), (80, 64), (144, 128), (192, 64)
    ),
    "other keys up to 256 columns, in multiples of 16, with values of 64, 128, 192 or 256": dims(
        (192, 192), (240, 192), (256, 64)
    ),
    "other widths": dims((576, 512), (264, 256), (72, 64), (100, 64), (32, 32), (192, 96)),
    "heads that share keys and values": here({"h": 16, "h_kv": 2}, {"h": 12, "h_kv": 1}),
    "k and v as views with gaps": here({"strided_kv": True}),
    "bf16": here({"dtype": "bf16"}),
    "fp16": here({"dtype": "fp16"}),
    "fp32": here({"dtype": "fp32"}),
    "Hopper (sm_90a)": [({}, key) for key in ("h100", "h800", "h200", "h20")],
    "other GPUs": [({}, key) for key in ("a100", "rtx4090", "b200")],
}


def test_the_table_of_prompts_agrees_with_the_versions() -> None:
    """Every cell, and that it has every version and row."""
    text = (Path(__file__).parents[2] / "docs" / "serving.md").read_text(encoding="utf-8")
    section = text.split("## Prompts\n")[1].split("\n## ")[0]
    lines = [[cell.strip() for cell in x.strip("|").split("|")] for x in section.splitlines() if x.startswith("|")]
    (_, *labels), _, *rows = lines
    known = [k for k in registry.all_kernels() if k.layer == "mla" and k.workload == "prefill"]
    assert set(labels) == {k.label for k in known if k.language not in NOT_SERVED}
    assert [name for name, *_ in rows] == list(PROMPTS)
    wrong = []
    for name, *cells in rows:
        for label, cell in zip(labels, cells, strict=True):
            if registry.missing(registry.KernelId.parse(label)):
                continue
            for fields, key in PROMPTS[name]:
                problem = PrefillProblem(**{"b": 4, "s": 1024, "h": 16, "causal": True, **fields})
                plan = registry.get_plan(registry.KernelId.parse(label))(problem, None, Device.get(key))
                verdict = plan.supported()
                verdict = plan.feasible() if verdict else verdict
                if bool(verdict) != (cell == "yes"):
                    wrong.append(f"{label}, {name}: {cell_name(problem)} on {key}: {verdict.reason or 'taken'}")
    assert not wrong, "\n".join(wrong)
