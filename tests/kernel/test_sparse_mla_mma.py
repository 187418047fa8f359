"""sparse_mla_mma without a GPU: its tiles fit every device, codes are widened rightly, lanes have the columns that the
partial results say they have, and no code spills in the loop of products."""

from __future__ import annotations

import itertools
import math
from pathlib import Path
from typing import Any

import pytest

from mla_var3.catalogue import registry
from mla_var3.device import Device
from mla_var3.workload.sparse_decode import SparseProblem

pytest.importorskip("cutlass", reason="nvidia-cutlass-dsl is not installed")

KERNEL = registry.KernelId.parse("cute-dsl/sparse_mla_mma")
LAYOUTS = ("v32", "flat", "bf16", "v32_no_rope", "flat_no_rope")


@pytest.mark.parametrize("device", [d for d in Device.all() if d.sm_version >= (8, 0)], ids=lambda d: d.key)
def test_tiles_fit_every_device(device: Device) -> None:
    plan_type: Any = registry.get_plan(KERNEL)
    for layout, h in itertools.product(LAYOUTS, (1, 8, 16, 17, 32, 64, 128)):
        plan = plan_type(SparseProblem(h=h, layout=layout), None, device)
        assert plan.supported() and plan.feasible(), (h, layout)
        geometry = plan.geometry()
        assert geometry.stages >= 4 and geometry.stride // 16 % 2 == 1 and geometry.stride >= geometry.row_bytes
        assert geometry.permutes == (layout != "bf16" and device.sm_version < (8, 9))
    chosen = plan_type(SparseProblem(h=128), None, device).geometry()
    assert chosen.tokens == (32 if device.smem_per_block > 150_000 else 16)
    assert chosen.m == (64 if device.arch == "sm_90a" else 32)


def test_what_does_not_fit_or_is_not_written_is_refused_with_a_reason() -> None:
    plan_type, rtx = registry.get_plan(KERNEL), Device.get("rtx4090")
    cases: tuple[tuple[dict[str, Any], dict[str, Any], str], ...] = (
        ({"h": 128}, {"tile_m": 64, "tile_n": 32}, "and 4 KV tiles of 32 tokens are over the 101,376"),
        ({"h": 16}, {"num_pipeline_stages": 8}, "are over the 101,376"),
        ({"h": 16}, {"num_pipeline_stages": 3}, "at least 4"),
        ({"h": 16}, {"tile_m": 16, "tile_n": 16}, "too few for eight warps"),
        ({"h": 16}, {"tile_m": 48}, "tile_m = 48"),
        ({"h": 16}, {"tile_n": 64}, "tile_n = 64"),
        ({"h": 16, "layout": "v4"}, {}, "layout v4 is not among those"),
        ({"h": 16, "extra": 64}, {}, "no extra one"),
        ({"h": 128, "s": 64}, {}, "workers wait for each other"),
    )
    for fields, knobs, word in cases:
        assert word in plan_type.tiling_type(**knobs).validate(SparseProblem(**fields), rtx).reason


def prmt(word: int, selector: int) -> int:
    """PTX `prmt` of a word and 0."""
    found = 0
    for i in range(4):
        nibble = selector >> 4 * i & 15
        byte = word >> 8 * (nibble & 7) & 255
        found |= (255 * (byte >> 7) if nibble & 8 else byte) << 8 * i
    return found


def bf16(bits: int) -> float:
    exponent, mantissa = bits >> 7 & 255, bits & 127
    if exponent == 255:
        return math.nan if mantissa else math.inf
    size = mantissa * 2.0**-133 if exponent == 0 else (1 + mantissa / 128) * 2.0 ** (exponent - 127)
    return -size if bits >> 15 else size


def test_byte_permutes_widen_every_code() -> None:
    """The steps of `widened`, in Python."""
    torch = pytest.importorskip("torch")
    values = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float().tolist()
    for code in range(256):
        word = code | (255 - code) << 8 | (code ^ 0x55) << 16 | code << 24
        magnitudes = word & 0x7F7F7F7F
        odd = magnitudes + 0x01010101
        for half, (order, spread) in enumerate(((0x1404, 0x9988), (0x3424, 0xBBAA))):
            bits = prmt(magnitudes, order) >> 4 | prmt(word, order) & 0x80008000
            added = prmt(odd, spread)
            for i in range(2):
                got = bf16(bits >> 16 * i & 0xFFFF) * 2.0**120 + bf16(added >> 16 * i & 0xFFFF)
                wanted = values[word >> 8 * (2 * half + i) & 255]
                assert got == wanted or (math.isnan(got) and math.isnan(wanted))


def test_lanes_have_the_columns_of_partial_results() -> None:
    """Columns of a lane's accumulators, and where `exchange` takes them, against the order of `split_kv.partials`."""
    from mla_var3.kernel.cute_python.mla.sparse_mla_mma.sparse_mla_mma import sparse_mla_mma as module

    plan_type: Any = registry.get_plan(KERNEL)
    geometry = plan_type(SparseProblem(h=64), None, Device.get("h200")).geometry()
    words: dict[tuple[int, int], tuple[int, int]] = {}  # (lane of a quad, word) -> columns of 32
    for lane, j in itertools.product(range(4), range(4)):
        pair = []
        for c in range(2):
            element, product = module.place_of(0, j, c, 0, geometry)
            # Products 2 i and 2 i + 1 have the even and the odd ones of 16 columns.
            pair.append(product // 2 * 16 + 2 * (2 * lane + element) + product % 2)
        words[lane, j] = (pair[0], pair[1])

    def swapped(before: dict[tuple[int, int], Any], bit: int) -> dict[tuple[int, int], Any]:
        after = {}
        for (lane, j), value in before.items():
            of_lane, of_word = lane >> bit & 1, j & 1
            after[lane & ~(1 << bit) | of_word << bit, j & ~1 | of_lane] = value
        return after

    dealt = swapped(swapped(words, 0), 1)
    assert dealt == {(lane, j): (8 * j + 2 * lane, 8 * j + 2 * lane + 1) for lane in range(4) for j in range(4)}
    assert swapped(swapped(dealt, 1), 0) == words


@pytest.mark.parametrize(
    ("key", "h", "layout"), [("a100", 16, "v32"), ("rtx4090", 128, "flat"), ("h200", 128, "v32")], ids=str
)
def test_no_code_spills_in_the_loop_and_that_for_other_gpus_has_no_instruction_of_hopper(
    key: str, h: int, layout: str, tmp_path: Path
) -> None:
    device = Device.get(key)
    plan = registry.get_plan(KERNEL)(SparseProblem(h=h, layout=layout), None, device)
    made = plan.plan_empty().compile(tmp_path, device, ("sass",))
    assert made.resources.spill_loop_bytes == 0 and made.resources.spill_bytes <= 96
    sass = made.artefacts["sass"].read_text()
    for name in ("UTMALDG", "HGMMA", "UBLKCP", *(("ACQBULK", "SYNCS") if device.sm_version < (9, 0) else ())):
        assert name not in sass
    assert "HMMA.16816" in sass and "LDGSTS" in sass and ".MT88" in sass
    assert ("E4M3.UNPACK" in sass) == (device.sm_version >= (8, 9))
