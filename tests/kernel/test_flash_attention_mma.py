"""flash_attention_mma without a GPU: its tiles fit every device, every query tile is some CTA's, the ones with the most
keys first, and the code for other GPUs has no instruction of Hopper and no spill in its loop.

The tile scheduler runs here as the kernel traces it, on the threads of a CTA (`device_on_cpu`).
"""

from __future__ import annotations

import inspect
import itertools
import random
from pathlib import Path
from types import FunctionType, SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("cutlass", reason="nvidia-cutlass-dsl is not installed")
pytest.importorskip("greenlet", reason="greenlet is not installed")

from device_on_cpu import ON_CPU, cute_on_cpu, cutlass_on_cpu, of_values, run_cta

from mla_var3.catalogue import registry
from mla_var3.device import Device
from mla_var3.workload.prefill import PrefillProblem

KERNEL = registry.KernelId.parse("cute-dsl/flash_attention_mma")
WIDTHS = ((128, 64), (128, 0), (256, 0), (128, 128), (64, 32), (192, 0), (64, 16))


def module() -> Any:
    return inspect.getmodule(registry.get_plan(KERNEL))


def geometry_of(h: int = 4, h_kv: int = 4, rows: int = 128, causal: bool = True) -> Any:
    return module().Geometry(h, h_kv, 192, 128, causal, rows, 4, 64, 1)


# ---------------------------------------------------------------- the scheduler on a CPU
def on_cpu(**others: Any) -> SimpleNamespace:
    """The module's functions with the code that the kernel traces, on plain integers. others: replace some of them."""
    names = dict(vars(module())) | ON_CPU | {"cutlass": cutlass_on_cpu(), "cute": cute_on_cpu()}
    for name, value in vars(module()).items():
        if callable(value) and getattr(value, "__module__", "") == module().__name__ and not inspect.isclass(value):
            code = inspect.unwrap(value)
            if isinstance(code, FunctionType):
                names[name] = FunctionType(code.__code__, names, name, code.__defaults__, code.__closure__)
    names |= others
    return SimpleNamespace(**{k: v for k, v in names.items() if k.isidentifier()})


def line_of(pairs: Any, geometry: Any, room: int = 1000, **others: Any) -> list[Any]:
    """The query tile of each CTA of the grid, in the order in which the GPU starts them; None where there is none.
    room: keys of a kv head that fit in L2."""
    made = on_cpu(**others)
    offsets = [of_values([0, *itertools.accumulate(x)]) for x in zip(*pairs, strict=True)]
    inputs = SimpleNamespace(cu_seqlens_q=offsets[0], cu_seqlens_k=offsets[1])
    tiles = []
    for index in range((sum(s for s, _ in pairs) // geometry.rows + len(pairs)) * geometry.h):
        arrays = [of_values([1 << 20] * module().SORTED) for _ in range(2)]
        storage = SimpleNamespace(
            **{
                name: SimpleNamespace(get_tensor=lambda _, found=array: found)
                for name, array in zip(("order", "counts"), arrays, strict=True)
            }
        )

        def work(storage: Any = storage, index: int = index) -> Any:
            from greenlet import getcurrent

            return made.tile_at(inputs, storage, index, room, getcurrent().thread, geometry)

        found = run_cta(work, geometry.threads)
        assert len(set(found)) == 1, "the warps of a CTA disagree"
        tiles.append(found[0] if found[0].rows > 0 else None)
    return tiles


def wanted(pairs: Any, heads: int, rows: int) -> set[tuple[int, int, int]]:
    """(first row of q, head, rows of the request from there on) of every query tile."""
    begins = itertools.accumulate([0, *(s for s, _ in pairs)])
    return {
        (begin + at, head, s - at)
        for begin, (s, _) in zip(begins, pairs, strict=False)
        for at in range(0, s, rows)
        for head in range(heads)
    }


@pytest.mark.parametrize(("requests", "rows"), [(1, 128), (3, 64), (40, 128), (130, 256)])
def test_every_query_tile_is_that_of_one_cta(requests: int, rows: int) -> None:
    rng = random.Random(requests)
    pairs = [(rng.choice((0, 1, rng.randrange(300))), rng.randrange(400)) for _ in range(requests)]
    heads = 2 if requests > 100 else 6
    tiles = line_of(pairs, geometry_of(heads, heads // 2, rows), rng.choice([1, 200, 1 << 20]))
    found = [tile for tile in tiles if tile is not None]
    named = [(tile.row, tile.head, tile.rows) for tile in found]
    assert len(named) == len(set(named)) and set(named) == wanted(pairs, heads, rows)
    assert tiles[: len(found)] == found, "CTAs without work are the last ones"
    begins = list(itertools.accumulate([0, *(s for s, _ in pairs)]))
    keys = list(itertools.accumulate([0, *(t for _, t in pairs)]))
    for tile in found:
        request = max(i for i, (s, _) in enumerate(pairs) if s and begins[i] <= tile.row)
        s, t = pairs[request]
        assert (tile.key, tile.keys, tile.seen) == (keys[request], t, t - s + (s - tile.rows) + 1)


def test_the_most_keys_come_first_and_heads_that_fit_in_l2_together() -> None:
    pairs = [(300, 300), (5, 900), (0, 2000), (700, 700), (300, 300), (129, 0)]
    line = [tile for tile in line_of(pairs, geometry_of(6, 3), room=1400) if tile is not None]
    assert [keys for keys, _ in itertools.groupby(tile.keys for tile in line)] == [900, 700, 300, 0]
    ends = [700 - at for at in reversed(range(0, 700, 128))]
    # Two kv heads of 700 keys have room, four query heads: in these, the last query tile of each first.
    of_700 = [(tile.head, tile.rows) for tile in line if tile.keys == 700]
    assert of_700 == [(head, x) for heads in ([0, 1, 2, 3], [4, 5]) for x in ends for head in heads]
    of_300 = [tile.key for tile in line if tile.keys == 300]
    assert of_300 == sorted(of_300), "equal requests stay as they come"


@pytest.mark.parametrize(
    ("name", "other"),
    [
        ("query_tiles", lambda s, rows: max(s, 0) // rows),
        ("place_of", lambda index, tiles, width, heads: (index % tiles, index // tiles % (heads - 1))),
    ],
)
def test_a_planted_fault_is_found(name: str, other: Any) -> None:
    pairs = [(300, 300), (5, 900)]
    tiles = [tile for tile in line_of(pairs, geometry_of(), **{name: other}) if tile is not None]
    assert {(x.row, x.head, x.rows) for x in tiles} != wanted(pairs, 4, 128)


@pytest.mark.parametrize("rows", [64, 128, 256])
def test_kv_tiles_are_those_that_rows_see(rows: int) -> None:
    made, rng = on_cpu(), random.Random(rows)
    for _ in range(300):
        s, t = rng.randrange(1, 600), rng.randrange(600)
        at = rng.randrange(0, s, rows) // rows
        for causal in (True, False):
            geometry = geometry_of(rows=rows, causal=causal)
            tile = made.tile_of((at, 0), 0, s, 0, t, geometry)
            sees = [
                min(max(t - s + row + 1, 0), t) if causal else t for row in range(at * rows, min(s, at * rows + rows))
            ]
            assert made.kv_tiles(tile, geometry) == -(-max(sees) // geometry.tokens)
            for row, keys in enumerate(sees):
                assert max(made.keys_seen(tile, row, causal), 0) == keys


# ---------------------------------------------------------------- what is taken, and how
@pytest.mark.parametrize("device", [d for d in Device.all() if d.sm_version >= (8, 0)], ids=lambda d: d.key)
def test_tiles_fit_every_device(device: Device) -> None:
    plan_type: Any = registry.get_plan(KERNEL)
    for d, p in WIDTHS:
        plan = plan_type(PrefillProblem(d=d, p=p), None, device)
        assert plan.supported() and plan.feasible(), (d, p)
        geometry = plan.geometry()
        assert geometry.warp_rows in (16, 32) and geometry.resident * geometry.warps <= 8
        assert geometry.tokens % (geometry.threads // 8) == 0 and geometry.rows % (geometry.threads // 8) == 0
        assert geometry.resident * (geometry.smem_bytes + device.smem_reserved_per_block) <= device.smem_per_sm
        if device.smem_per_block > 150_000:
            assert geometry.resident == 2 or d > 128
    chosen = plan_type(PrefillProblem(), None, device).geometry()
    if device.arch in ("sm_100a", "sm_103a"):
        assert (chosen.rows, chosen.warp_rows, chosen.tokens) == (64, 16, 64)
    else:
        large = device.smem_per_block > 150_000
        tokens = 32 if device.arch != "sm_90a" and large else 64
        assert (chosen.rows, chosen.warp_rows, chosen.tokens) == (128, 32 if large else 16, tokens)


def test_what_does_not_fit_or_is_not_written_is_refused_with_a_reason() -> None:
    plan_type, rtx = registry.get_plan(KERNEL), Device.get("rtx4090")
    cases: tuple[tuple[dict[str, Any], dict[str, Any], str], ...] = (
        ({}, {"tile_m": 256}, "are over the 101,376 that a CTA of rtx4090"),
        ({}, {"tile_m": 128, "num_pipeline_stages": 2, "tile_n": 64}, "2 KV tiles of 64 keys are over"),
        ({}, {"tile_m": 64, "warps": 8}, "8 query rows of a warp"),
        ({"d": 256, "p": 0}, {"tile_m": 128, "warps": 4}, "for values of 256 columns"),
        ({}, {"tile_m": 48}, "tile_m = 48, and this version is written for 64 and 128 and 256"),
        ({}, {"num_pipeline_stages": 3}, "num_pipeline_stages = 3"),
        ({}, {"section_mib": 0}, "section_mib = 0"),
        ({"d": 96, "p": 0}, {}, "values of d = 96 columns must be 64, 128, 192 or 256"),
        ({"d": 128, "p": 8}, {}, "keys of d + p = 136 columns must be a multiple of 16, 256 at most"),
        ({"b": 64, "s": 1 << 20}, {}, "lse is (128, 67,108,864)"),
    )
    for fields, knobs, words in cases:
        assert words in plan_type.tiling_type(**knobs).validate(PrefillProblem(**fields), rtx).reason
    assert "fp32" in plan_type(PrefillProblem(dtype="fp32"), None, rtx).supported().reason


def test_no_query_needs_no_launch() -> None:
    problem = PrefillProblem(b=2, h=2, lengths=[[0, 5], [0, 0]])
    plan = registry.get_plan(KERNEL)(problem, device=Device.get("a100"))
    bound = plan.plan(*plan.prepare_inputs("cpu"))
    bound.launch()
    assert [tuple(x.shape) for x in bound.output_tensors] == [(0, 2, 128), (2, 0)]


@pytest.mark.parametrize("key", ["a100", "rtx4090"])
def test_the_code_for_other_gpus_has_no_instruction_of_hopper(key: str, tmp_path: Path) -> None:
    """Nor does it spill in the loop of products."""
    device = Device.get(key)
    plan: Any = registry.get_plan(KERNEL)(PrefillProblem(h=8, causal=True), None, device)
    made = plan.plan_empty().compile(tmp_path, device, ("sass",))
    resources, geometry = made.resources, plan.geometry()
    assert resources.spill_loop_bytes == 0 and resources.spill_bytes <= 96
    assert resources.ctas_per_sm == geometry.resident
    sass = made.artefacts["sass"].read_text()
    for name in ("ACQBULK", "UTMALDG", "SYNCS", "HGMMA", "UBLKCP"):
        assert name not in sass
    # In one loop of KV tiles with a mask, and in one of those without.
    products = 2 * geometry.along_m * geometry.tokens // 8 * (192 + 128) // 16
    assert sass.count("HMMA.16816") == products and sass.count("LDGSTS") > 20 and ".MT88" in sass
