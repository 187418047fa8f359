"""What docs/serving.md and docs/install.md say that versions take, and which of them are picked, against the versions
and the dispatcher themselves."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from mla_var3.catalogue import registry
from mla_var3.device import Device
from mla_var3.dispatch import choose
from mla_var3.dispatch.selection import NOT_SERVED
from mla_var3.errors import Unsupported
from mla_var3.lab.naming import cell_name
from mla_var3.workload import Problem, get
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


# ---------------------------------------------------------------- what is picked
Wanted = tuple[Problem, str]
FAMILIES = (("h100", "h200"), ("a100", "a40", "rtx4090"), ("b200", "rtx5090"))
TORCH, NONE = "torch", "none"


def rows(page: str, after: str) -> list[list[str]]:
    """The cells of the first table behind a line, its head and the line below it left out."""
    text = (Path(__file__).parents[2] / "docs" / page).read_text(encoding="utf-8").split(f"{after}\n")[1]
    lines = text[text.index("\n|") + 1 :].split("\n\n")[0].splitlines()
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def picked(wanted: Sequence[Wanted]) -> set[str]:
    """The versions that are picked for problems on devices; `NONE` where no version takes one."""
    found = set()
    for problem, key in wanted:
        try:
            found.add(choose(problem, Device.get(key)).kernel.label)
        except Unsupported:
            found.add(NONE)
    return found


def said(cell: str) -> set[str]:
    """The versions that a cell of the pages names, and `NONE` where it says torch or none."""
    named = set(re.findall(r"`((?:cute-dsl|triton|cutile-dsl)/\w+)`", cell))
    return named | ({NONE} if re.search(rf"\b({TORCH}|{NONE})\b", cell) else set())


def need_all_languages() -> None:
    served = (k for k in registry.all_kernels() if k.language not in NOT_SERVED)
    if reason := next((text for k in served if (text := registry.missing(k))), ""):
        pytest.skip(reason)


# ---------------------------------------------------------------- prompts
def prompts(
    *sizes: tuple[int, int], s: Sequence[int] = (77, 1024, 8192), causal: Sequence[bool] = (True, False)
) -> list[dict[str, Any]]:
    """Fields of problems. sizes: columns of keys and of values; s: query tokens."""
    return [{"d": dv, "p": dk - dv, "s": n, "causal": mask} for dk, dv in sizes for n in s for mask in causal]


#: 32 query tiles over many keys.
FEW_TILES = {"b": 1, "s": 512, "t": 4608}
#: 32 query tiles a head.
LONG = {"b": 1, "s": 8192, "t": 8192}
PROMPTS: dict[str, list[dict[str, Any]]] = {
    "192 / 128": [*prompts((192, 128), s=(1, 128, 129, 8192)), {"d": 128, "p": 64, **FEW_TILES}],
    "128 / 128": [*prompts((128, 128), s=(128, 129, 509, 510, 8192)), {"d": 128, "p": 0, **FEW_TILES}],
    "256 / 256": prompts((256, 256), s=(77, 4095, 4096)),
    "256 / 128": prompts((256, 128), s=(77, 4095, 4096)),
    "96 / 64": prompts((96, 64), s=(77, 255, 256, 4095, 4096)),
    "other keys of 128 to 192, in multiples of 16, with values of 64 or 128": prompts((144, 128), (128, 64), (192, 64)),
    "other keys up to 256, in multiples of 16, with values of 64, 128, 192 or 256": prompts(
        (64, 64), (112, 64), (192, 192), (208, 128), (240, 192), (256, 64)
    ),
    "other widths": prompts((576, 512), (264, 256), (72, 64), (100, 64), (32, 32), (192, 96)),
}
#: Problems on both sides of each boundary that the table names: fields, device, and what is picked there.
SIDES = [
    ((192, 128), 128, "v22"), ((192, 128), 129, "v23"), ((128, 128), 509, "v22"), ((128, 128), 510, "v23"),
    ((192, 128), 4095, "v23"), ((192, 128), 4096, "v18"), ((128, 128), 4095, "v23"), ((128, 128), 4096, "v18"),
    ((256, 128), 4095, "v22"), ((256, 128), 4096, "v12"), ((96, 64), 4095, "v22"), ((96, 64), 4096, "v12"),
    ((256, 256), 4095, "v22"), ((256, 256), 4096, "v12"), ((256, 192), 4095, "v22"), ((256, 192), 4096, "v12"),
    ((208, 128), 4095, "v22"), ((208, 128), 4096, "v12"), ((64, 64), 4095, "v22"), ((64, 64), 4096, "v12"),
    ((112, 64), 8192, "v22"),
]  # fmt: skip
#: The same without a mask.
UNMASKED = [
    ((192, 128), 128, "v22"), ((192, 128), 129, "v23"), ((128, 128), 128, "v22"), ((128, 128), 255, "v22"),
    ((128, 128), 256, "v23"), ((192, 128), 4096, "v18"), ((128, 128), 4096, "v18"),
    ((256, 128), 4095, "v22"), ((256, 128), 4096, "v12"), ((96, 64), 4095, "v22"), ((96, 64), 4096, "v12"),
    ((256, 256), 4095, "v22"),
]  # fmt: skip
#: What every version in the table takes besides.
ALSO: list[dict[str, Any]] = [
    {"lengths": "lognormal"}, {"lengths": [9, 0, 300, 1]}, {"s": 512, "t": 8192}, {"h_kv": 2}, {"strided_kv": True},
    {"lengths": [(9, 50), (0, 7), (300, 300), (1, 2)]}, {"causal": False},
]  # fmt: skip


def prompt(**fields: Any) -> PrefillProblem:
    return PrefillProblem(**{"b": 4, "s": 1024, "h": 16, "causal": True, **fields})


def test_the_table_of_prompts_says_what_is_picked() -> None:
    need_all_languages()
    table = rows("serving.md", "### Which version computes a prompt")
    assert [row[0] for row in table] == list(PROMPTS)
    for name, hopper, others in table:
        for cell, keys in ((hopper, FAMILIES[0]), (others, (*FAMILIES[1], *FAMILIES[2]))):
            fields = [{"dtype": dtype, **some} for some in PROMPTS[name] for dtype in ("bf16", "fp16")]
            wanted = [(prompt(**x), key) for x in fields for key in keys]
            assert picked(wanted) == said(cell), (name, cell)


def test_the_boundaries_of_the_table_of_prompts() -> None:
    need_all_languages()
    for fields, version in (
        ({**LONG, "h": 1}, "v23"), ({**LONG, "h": 2}, "v18"), ({**FEW_TILES, "s": 100, "t": 2048}, "v23"),
        ({**FEW_TILES, "s": 100, "t": 2047}, "v22"), ({**FEW_TILES, "s": 128, "h": 33}, "v23"),
        ({**FEW_TILES, "s": 128, "h": 34}, "v22"),
    ):  # fmt: skip
        assert picked([(prompt(**fields), "h200")]) == {f"cute-dsl/flash_attention_{version}"}, fields
    for (dk, dv), s, version in SIDES:
        assert picked([(prompt(d=dv, p=dk - dv, s=s), "h200")]) == {f"cute-dsl/flash_attention_{version}"}, (dk, dv, s)
    for (dk, dv), s, version in UNMASKED:
        found = picked([(prompt(d=dv, p=dk - dv, s=s, causal=False), "h200")])
        assert found == {f"cute-dsl/flash_attention_{version}"}, (dk, dv, s)


@pytest.mark.parametrize("fields", ALSO, ids=str)
def test_every_version_of_the_table_of_prompts_takes_any_lengths_and_views(fields: dict[str, Any]) -> None:
    need_all_languages()
    for key in ("h200", "a100", "rtx4090", "b200"):
        assert NONE not in picked([(prompt(dtype=dtype, **fields), key) for dtype in ("bf16", "fp16")]), key


# ---------------------------------------------------------------- families of GPUs
def decode(**fields: Any) -> MlaProblem:
    return MlaProblem(**{"b": 4, "t": 4096, "h": 128, **fields})


def sparse(**fields: Any) -> Problem:
    return get("sparse_decode").problem(**{"b": 4, "h": 64, "t": 4096, **fields})


MANY = {"queries": [3, 0, 70, 1]}
PACKED = [
    sparse(layout=layout, **more)
    for layout in ("v32", "flat", "v32_no_rope", "flat_no_rope")
    for more in ({"topk": 512}, {"paged": True})
]
NAMED: dict[str, list[Problem]] = {
    "decode, up to 32 query rows": [decode(h=16, page=page) for page in (1, 8, 16, 64)],
    "decode, more query rows": [decode(), decode(h=16, s=4), decode(dtype="fp16")],
    "decode, more query rows, requests that differ in query tokens, a mask, or no rope columns": [
        decode(**MANY), decode(**MANY, dtype="fp16"), decode(h=16, s=8, tree=True), decode(p=0)
    ],
    "sparse decode, and decode over packed caches: layouts `v32`, `flat`, `v32_no_rope`, `flat_no_rope`": PACKED,
    "sparse decode over bf16 caches": [sparse(layout="bf16", topk=512)],
    "layout `v4`, and extra caches (DeepSeek V4)": [
        sparse(layout="v4", topk=512), sparse(layout="v4", topk=128, extra=512), sparse(layout="v4", paged=True)
    ],
    "layouts `v41`, `v41_planar` (DeepSeek V4.1)": [sparse(layout=x, topk=512) for x in ("v41", "v41_planar")],
    "prompts, keys of 128 to 192 columns, values of up to 128": [
        prompt(d=dv, p=dk - dv) for dk, dv in ((192, 128), (128, 128), (144, 128), (128, 64))
    ],
    "prompts, other widths": [prompt(d=64, p=32), prompt(d=256, p=0), prompt(d=128, p=128)],
    "logits and top-k of the indexer": [
        get(name).problem(**get(name).sample(False, {})) for name in ("indexer_logits", "topk")
    ],
    "new tokens into caches (`rope_append`, `latent_append`), `rmsnorm`, `merge_partials`": [],
    "`absorb_gemm`": [
        get("gemm").problem(side=side, tokens=n, h=128) for side in ("q", "out") for n in (1, 32, 33, 128, 4096)
    ],
}  # fmt: skip


def test_the_table_of_families_says_what_is_picked() -> None:
    need_all_languages()
    table = rows("install.md", "## GPUs other than Hopper")
    assert [row[0] for row in table] == list(NAMED)
    for name, *cells in table:
        for cell, keys in zip(cells, FAMILIES, strict=True):
            if "table" in cell or "versions" in cell:  # another table says it, or a language is named alone
                continue
            assert picked([(problem, key) for problem in NAMED[name] for key in keys]) == said(cell), (name, cell)
