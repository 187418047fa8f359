"""Version 2 of sparse_mla has one piece of code for pages of any size but those that engines have: which problems share
it, and where it takes tokens to be. The functions that find them run here as host code."""

# ruff: noqa: E402 - the imports below need what importorskip found
from __future__ import annotations

import functools
import random
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest

torch = pytest.importorskip("torch")
cutlass = pytest.importorskip("cutlass", reason="nvidia-cutlass-dsl is not installed")

import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64
from cutlass.cute.runtime import from_dlpack
from planning import plan_type, planned

from mla_var3.catalogue import registry
from mla_var3.device import Device
from mla_var3.kernel.cute_python.split_kv.scheduler import Split
from mla_var3.lab import bundle
from mla_var3.packed_cache import LAYOUTS, fields, layout_of, new_cache
from mla_var3.toolchain import aot
from mla_var3.workload.sparse_decode import SparseProblem, make_inputs

H200 = Device.get("h200")
LABEL = "cute-dsl/sparse_mla_v2"
PLAN = plan_type(LABEL)
V2 = sys.modules[PLAN.__module__]
V4: dict[str, Any] = {"layout": "v4", "h": 64, "sink": True, "extra": 512}
LARGEST = 2**31 - 1


# ---------------------------------------------------------------- what shares code
def code_key(page: int, extra_page: int = 0, **more: Any) -> str:
    problem = SparseProblem(**more, page=page, extra_page=extra_page)
    key: str = PLAN.code_class(problem).key()
    return key


@pytest.mark.parametrize("page", V2.CONSTANT_PAGES)
def test_pages_of_engines_are_a_constant(page: int) -> None:
    for more in ({}, {"layout": "flat", "paged": True, "lengths": True}):
        problem = SparseProblem(**more, page=page)
        assert PLAN.code_class(problem) == problem.problem_class()
        assert f"_pg{page}_x0" in code_key(page, **more)
    for extra_page in V2.CONSTANT_PAGES:
        assert f"_pg{page}_x{extra_page}_" in code_key(page, extra_page, **V4)


def test_all_other_pages_have_one_class() -> None:
    assert {code_key(page) for page in (2, 4, 7, 61, 63, 65, 512, 576, 4096)} == {"sparse_v32_s1_h128_pgany_x0"}
    pairs = ((61, 53), (53, 61), (2, 2), (64, 2), (1, 3), (69, 64), (256, 2), (576, 576))
    assert {code_key(*pair, **V4) for pair in pairs} == {"sparse_v4_s1_h64_pgany_xany_sink"}
    assert code_key(61, paged=True, layout="v4") == "dense_v4_s1_h128_pgany_x0"
    assert code_key(61, layout="v4", extra=8) == "sparse_v4_s1_h128_pgany_xany", "the extra cache has as many tokens"


def test_the_class_of_a_problem_says_its_pages() -> None:
    """It is what a problem is made from, and what all other versions are compiled for."""
    problem = SparseProblem(**V4, page=61, extra_page=53)
    assert problem.problem_class().key() == "sparse_v4_s1_h64_pg61_x53_sink"
    others = [k for k in registry.all_kernels() if k.label != LABEL and registry.missing(k) is None]
    of_workload = [plan for k in others if (plan := registry.get_plan(k)).workload.name == problem.workload]
    assert len(of_workload) > 3
    assert all(plan.code_class(problem) == problem.problem_class() for plan in of_workload)


def test_geometry_and_key_are_those_of_the_class() -> None:
    tiling = PLAN.tiling_type()

    def key(page: int, extra_page: int) -> aot.Key:
        plan = PLAN(SparseProblem(**V4, page=page, extra_page=extra_page), tiling, H200)
        return aot.make_key("0" * 16, plan.code_class(plan.problem), tiling, H200, "sparse_mla_v2")

    assert key(61, 53).digest == key(2, 64).digest != key(64, 64).digest
    geometries = [tiling.geometry(SparseProblem(**V4, page=page, extra_page=x)) for page, x in ((61, 53), (64, 2))]
    assert geometries[0] == geometries[1]
    assert (geometries[0].page, geometries[0].extra_page) == (V2.ANY_PAGE, V2.ANY_PAGE)
    assert tiling.geometry(SparseProblem(page=61)).extra_page == 0


def test_a_bundle_compiles_it_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[bundle.BundleJob] = []
    monkeypatch.setattr(bundle, "_make", lambda folder, jobs, *rest: made.extend(jobs))
    problems = [SparseProblem(**V4, b=64, page=page, extra_page=x) for page, x in ((61, 53), (2, 64), (64, 64), (7, 7))]
    bundle.make_served(tmp_path, problems)
    assert [len(job.points) for job in made] == [3, 1]
    assert "pgany_xany" in made[0].label and "pg64_x64" in made[1].label
    made.clear()
    bundle.make_bundle(tmp_path, [LABEL], problems)
    assert sorted(len(job.points) for job in made if job.points) == [1, 3]


# ---------------------------------------------------------------- where tokens lie
@cute.jit
def places_of(found: cute.Tensor, indices: cute.Tensor, tokens: cute.Tensor, of: cutlass.Constexpr) -> None:
    """found: (n, 2), addresses of rows and, where they lie elsewhere, of their scales. of: `Of`."""
    geometry, layout = of
    cache = V2.Cache(tokens, indices, None, V2.divisor_of(tokens, geometry))
    for i in cutlass.range(indices.shape[0]):
        row, scales = Int64(0), Int64(0)
        if cutlass.const_expr(geometry.fine):
            row = V2.codes_address(cache, indices[i], layout)
            if cutlass.const_expr(layout.planar):
                scales = V2.scales_address(cache, indices[i], layout)
        else:
            row = V2.row_address(cache, indices[i], geometry)
            if cutlass.const_expr(geometry.layout == "v4"):
                scales = V2.scale_address(cache, indices[i], geometry)
        found[i, 0] = row
        found[i, 1] = scales


@cute.jit
def tokens_of(found: cute.Tensor, rows: cute.Tensor, tokens: cute.Tensor, of: cutlass.Constexpr) -> None:
    """found: (n,), what `named` makes of rows of tiles. rows: (n, 4): index as it is in memory, the tile's first
    position, the row in it, and how many count from there on."""
    cache = V2.Cache(tokens, rows, None, V2.divisor_of(tokens, of.geometry))
    for i in cutlass.range(rows.shape[0]):
        read = V2.Row(rows[i, 0], Boolean(False), rows[i, 3], Boolean(True), rows[i, 1], Int32(0), Boolean(False))
        found[i] = V2.named(read, (cache,), rows[i, 2], of.geometry).index


class Of(NamedTuple):
    geometry: Any
    layout: Any


def of(name: str, **more: Any) -> Of:
    """The code for pages of any size of a layout, which may be one of extra caches alone."""
    beside = {other: main for main, layout in LAYOUTS.items() for other in layout.beside if LAYOUTS[other].bits == 4}
    extra = {"extra": 64, "extra_layout": name} if name in beside else {}
    problem = SparseProblem(h=64, page=61, layout=beside.get(name, name), **extra, **more)
    geometry = PLAN.tiling_type().geometry(problem)
    assert geometry.page == V2.ANY_PAGE
    return Of(geometry, layout_of(name))


@functools.cache
def host_code(function: Any, code: Of) -> Any:
    made = torch.zeros(2, 2, dtype=torch.int64), torch.zeros(2, dtype=torch.int32)
    if function is tokens_of:
        made = torch.zeros(2, dtype=torch.int32), torch.zeros(2, 4, dtype=torch.int32)
    cache = torch.zeros(2, 2, code.layout.token_bytes, dtype=torch.uint8)
    return cute.compile(function, *map(dynamic, (*made, cache)), code)


def dynamic(tensor: Any) -> Any:
    return from_dlpack(tensor, assumed_align=16).mark_layout_dynamic(leading_dim=tensor.dim() - 1)


def cache_of(layout: Any, pages: int, page: int, apart: int = 0) -> Any:
    """A cache of bytes; apart: how much further its pages begin than they do behind each other."""
    cache = new_cache(layout, pages, page, "cpu").view(torch.uint8)
    step = cache.stride(0) + apart
    return torch.zeros(pages * step, dtype=torch.uint8).as_strided(cache.shape, (step, cache.stride(1), 1))


@pytest.mark.parametrize("apart", [0, 1152])
@pytest.mark.parametrize("name", [name for name in LAYOUTS if name != "bf16"])
def test_a_token_is_found_in_a_page_of_any_size(name: str, apart: int) -> None:
    code = of(name)
    for page in (1, 2, 3, 7, 53, 61, 64, 69, 576):
        cache = cache_of(code.layout, 5, page, apart)
        found = torch.zeros(5 * page, 2, dtype=torch.int64)
        indices = torch.arange(5 * page, dtype=torch.int32)
        host_code(places_of, code)(*map(dynamic, (found, indices, cache)))
        parts = fields(code.layout, cache)
        for i in {0, 1, page - 1, page, 2 * page + page // 2, 5 * page - 1}:
            place = i // page, i % page
            assert found[i, 0] == parts.codes[place].data_ptr(), (page, i)
            assert found[i, 1] in (0, 0 if parts.scales is None else parts.scales[place].data_ptr()), (page, i)
    planar = name == "v4" or code.layout.planar
    assert bool(found[0, 1]) == planar, "elsewhere scales are copied with their row"


def test_the_largest_indices_are_divided() -> None:
    run, rng, base = host_code(places_of, of("v32")), random.Random(5), torch.zeros(656, dtype=torch.uint8)
    for page in (1, 2, 3, 61, 576, 65535, 2**20 + 1, 2**21 + 1):
        numbers = [0, page - 1, page, LARGEST - 1, LARGEST, *(rng.randrange(2**31) for _ in range(50))]
        found = torch.zeros(len(numbers), 2, dtype=torch.int64)
        cache = base.as_strided((1, page, 656), (2**24, 0, 1))  # of which only the shape is read
        run(*map(dynamic, (found, torch.tensor(numbers, dtype=torch.int32), cache)))
        wanted = [i // page * 2**24 + i % page * 656 for i in numbers]
        assert (found[:, 0] - base.data_ptr()).tolist() == wanted, page


@pytest.mark.parametrize("paged", [False, True])
def test_indices_outside_of_the_cache_name_no_token(paged: bool) -> None:
    run, rng = host_code(tokens_of, of("v32", paged=paged)), random.Random(6)
    for page in (1, 2, 7, 61, 64, 576):
        pages = 5
        tokens = pages * page
        ends = [0, pages - 1] if paged else [0, tokens - 1, tokens, tokens + 1, -1, -(2**31), LARGEST]
        rows = []
        for _ in range(200):
            index = rng.choice([*ends, rng.randrange(pages if paged else tokens)])
            rows.append((index, 64 * rng.randrange(40), rng.randrange(64), rng.randrange(-5, 70)))
        found = torch.zeros(len(rows), dtype=torch.int32)
        run(*map(dynamic, (found, torch.tensor(rows, dtype=torch.int32), cache_of(layout_of("v32"), pages, page))))
        for (index, first, row, left), token in zip(rows, found.tolist(), strict=True):
            wanted = index * page + (first + row) % page if paged else index
            assert token == (wanted if row < left and 0 <= wanted < tokens else -1), (page, index, first, row, left)


@cute.jit
def entries_of(found: cute.Tensor, asked: cute.Tensor, cache: cutlass.Constexpr, geometry: cutlass.Constexpr) -> None:
    """`read_row` of a page table. asked: (n, 3): request, tile and row."""
    for i in cutlass.range(asked.shape[0]):
        request, tile = asked[i, 0], asked[i, 1]
        place = V2.Progress(Split(Int32(0), Int32(1), request, Int32(0), Int32(0)), tile, tile + 1, Int32(-1))
        found[i] = V2.read_row((cache,), place, Int32(0), asked[i, 2], geometry).index


@cute.jit
def launch_entries(
    found: cute.Tensor, asked: cute.Tensor, table: cute.Tensor, lengths: cute.Tensor, tokens: cute.Tensor,
    geometry: cutlass.Constexpr,
) -> None:  # fmt: skip
    entries_of(found, asked, V2.Cache(tokens, table, lengths, V2.divisor_of(tokens, geometry)), geometry)


def test_the_entry_of_a_position_is_read() -> None:
    """Entry position // page of a page table; where a request has no such position, that of its last token."""
    geometry, rng, run = of("v32", paged=True).geometry, random.Random(7), None
    for page in (1, 3, 61, 64, 576):
        lengths = [0, 1, page, page + 1, 64, 65, 1000]
        table = torch.arange(7 * 1100, dtype=torch.int32).view(7, 1100)
        asked = [(rng.randrange(7), rng.randrange(17), rng.randrange(64)) for _ in range(200)]
        found = torch.zeros(len(asked), dtype=torch.int32)
        given = found, torch.tensor(asked, dtype=torch.int32), table, torch.tensor(lengths, dtype=torch.int32)
        arguments = [*map(dynamic, (*given, cache_of(layout_of("v32"), 2, page)))]
        run = run or cute.compile(launch_entries, *arguments, geometry)
        run(*arguments)
        for (request, tile, row), entry in zip(asked, found.tolist(), strict=True):
            position = max(0, min(64 * tile + row, lengths[request] - 1))
            assert entry == 1100 * request + position // page, (page, request, tile, row)


# ---------------------------------------------------------------- on a GPU
@pytest.mark.gpu
@pytest.mark.parametrize(
    "problem",
    [
        SparseProblem(b=64, h=64, t=2048),
        SparseProblem(b=5, s=2, h=128, t=2048, layout="v4", topk=128, page=256, extra=512, extra_page=64, sink=True),
        SparseProblem(b=9, h=16, t=1000, layout="flat", page=32, paged=True, lengths=True),
        SparseProblem(b=7, h=64, t=1000, layout="v41_planar", topk=128, extra=200, extra_layout="v41_fp4_planar"),
    ],
    ids=lambda p: p.label,
)
def test_code_for_any_page_gives_the_bits_of_that_for_a_constant_one(
    problem: SparseProblem, monkeypatch: pytest.MonkeyPatch
) -> None:
    inputs = make_inputs(problem, "cuda", seed=3, dist="empty" if problem.paged else "holes")
    made = []
    for pages in (V2.CONSTANT_PAGES, ()):
        monkeypatch.setattr(V2, "CONSTANT_PAGES", pages)
        plan = planned(LABEL, problem)
        assert ("any" in plan.code_class(problem).key()) == (not pages)
        made.append([x.clone() for x in plan.plan(*inputs)()])
    assert all(torch.equal(a, b) for a, b in zip(*made, strict=True))
