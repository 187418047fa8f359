"""Packed caches: the layouts byte by byte, as they are described, and packing and unpacking against each other."""

from __future__ import annotations

import math
import struct
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from mla_var3.errors import UserError  # noqa: E402
from mla_var3.packed_cache import (  # noqa: E402
    LAYOUTS,
    bytes_of,
    fields,
    flat_scale,
    gather,
    layout_of,
    new_cache,
    pack,
    quantised,
    ue8m0_of,
    ue8m0_value,
    unpack,
)


# ---------------------------------------------------------------- the description, in plain Python
def e4m3(code: int) -> float:
    """One sign, four exponent and three mantissa bits, bias 7; no infinities, NaN is all ones."""
    sign = -1.0 if code & 0x80 else 1.0
    exponent, mantissa = code >> 3 & 15, code & 7
    if exponent == 15 and mantissa == 7:
        return math.nan
    return sign * (mantissa * 2.0**-9 if exponent == 0 else (8 + mantissa) * 2.0 ** (exponent - 10))


def bf16(two: bytes) -> float:
    return float(struct.unpack("<f", b"\0\0" + two)[0])


def token_of(name: str, memory: bytes, page: int, page_bytes: int, token: int, scale: float) -> list[float]:
    """The columns of a token. memory: of the whole cache, pages of `page` tokens every `page_bytes`."""
    begin, row = token // page * page_bytes, token % page
    if name == "v32":
        at = begin + 656 * row
        scales = struct.unpack("<4f", memory[at + 512 : at + 528])
        found = [e4m3(memory[at + i]) * scales[i // 128] for i in range(512)]
        return found + [bf16(memory[at + 528 + 2 * i : at + 530 + 2 * i]) for i in range(64)]
    if name == "v4":
        at, scales_at = begin + 576 * row, begin + 576 * page + 8 * row
        found = [e4m3(memory[at + i]) * 2.0 ** (memory[scales_at + i // 64] - 127) for i in range(448)]
        return found + [bf16(memory[at + 448 + 2 * i : at + 450 + 2 * i]) for i in range(64)]
    if name == "flat":
        return [e4m3(memory[begin + 576 * row + i]) * scale for i in range(576)]
    at = begin + 1152 * row
    return [bf16(memory[at + 2 * i : at + 2 * i + 2]) for i in range(576)]


def memory_of(cache: Any) -> bytes:
    """Every byte from the first of the cache on, those between pages too."""
    return bytes(cache.untyped_storage().tolist())


def values_of(name: str, pages: int = 3, page: int = 5, seed: int = 0) -> Any:
    generator = torch.Generator().manual_seed(seed)
    columns = LAYOUTS[name].columns
    x = torch.randn((pages, page, columns), generator=generator)
    return (
        x * torch.exp(2 * torch.randn((pages, page, columns // 64), generator=generator)).repeat_interleave(64, -1)
    ).bfloat16()


def packed(name: str, values: Any, **options: Any) -> tuple[Any, Any]:
    scale = flat_scale(values) if name == "flat" else None
    return pack(LAYOUTS[name], values, scale=scale, **options), scale


# ---------------------------------------------------------------- sizes
@pytest.mark.parametrize(
    ("name", "columns", "size"), [("v32", 576, 656), ("v4", 512, 584), ("flat", 576, 576), ("bf16", 576, 1152)]
)
def test_what_a_token_takes(name: str, columns: int, size: int) -> None:
    layout = layout_of(name)
    assert (layout.columns, layout.token_bytes) == (columns, size)
    cache = new_cache(layout, 2, 64)
    assert cache.shape[:2] == (2, 64) and cache[0, 0].numel() * cache.element_size() == size


@pytest.mark.parametrize(("page", "size"), [(1, 1152), (2, 1728), (64, 37440), (72, 42048), (256, 149760)])
def test_pages_of_v4_are_padded(page: int, size: int) -> None:
    assert layout_of("v4").page_bytes(page) == size and size % 576 == 0
    cache = new_cache(layout_of("v4"), 3, page)
    assert cache.stride() == (size, 584, 1)


# ---------------------------------------------------------------- unpacking, against the description
@pytest.mark.parametrize("page", [1, 5, 64])
@pytest.mark.parametrize("name", LAYOUTS)
def test_every_byte_is_read_as_described(name: str, page: int) -> None:
    """Of random bytes, all codes among them."""
    layout, generator = layout_of(name), torch.Generator().manual_seed(page)
    cache = new_cache(layout, 2, page)
    size = layout.page_bytes(page)
    if name == "bf16":
        cache.copy_(torch.randn(cache.shape, generator=generator))
    else:
        cache.as_strided((2 * size,), (1,)).copy_(torch.randint(256, (2 * size,), generator=generator))
        if name == "v32":  # random bits are huge as float32
            fields(layout, cache).scales.copy_(torch.randn((2, page, 4), generator=generator))
        elif name == "v4":
            fields(layout, cache).scales.clamp_(max=254)
    scale = torch.tensor([0.37]) if name == "flat" else None
    memory, found = memory_of(cache), unpack(layout, cache, scale).flatten(0, 1)
    tokens = sorted({0, page - 1, page, 2 * page - 1})
    expected = [token_of(name, memory, page, size, t, 0.0 if scale is None else float(scale)) for t in tokens]
    wanted = torch.tensor(expected, dtype=torch.float64)
    assert found.dtype == torch.float64
    assert torch.equal(found[tokens].nan_to_num(nan=-1e9), wanted.nan_to_num(nan=-1e9))
    again = gather(layout, cache, torch.tensor(tokens), scale)
    assert torch.equal(again.nan_to_num(nan=-1e9), wanted.nan_to_num(nan=-1e9))


def test_all_codes_of_e4m3() -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    found = unpack(layout_of("flat"), codes.repeat(3)[:576].view(1, 1, 576), torch.ones(1))[0, 0, :256]
    wanted = torch.tensor([e4m3(code) for code in range(256)], dtype=torch.float64)
    assert torch.equal(found.isnan(), wanted.isnan()) and int(wanted.isnan().sum()) == 2
    assert torch.equal(found.nan_to_num(), wanted.nan_to_num()) and float(wanted.nan_to_num().max()) == 448.0


def test_all_scales_of_ue8m0() -> None:
    bits = torch.arange(256, dtype=torch.uint8)
    found = ue8m0_value(bits)
    assert [float(x) for x in found[:255]] == [2.0 ** (i - 127) for i in range(255)] and bool(found[255].isnan())
    assert torch.equal(ue8m0_of(found[1:].float()), bits[1:])


# ---------------------------------------------------------------- packing
def nearest_code(x: float) -> int:
    """The code of the nearest finite e4m3 of the sign, the even one of two."""
    codes = range(0x80, 0xFF) if math.copysign(1.0, x) < 0 else range(0x7F)
    return min(codes, key=lambda code: (abs(e4m3(code) - x), code & 1))


def test_codes_are_the_nearest_ones() -> None:
    edges = [0.0, -0.0, 2.0**-10, 3 * 2.0**-10, 2.0**-9, 17 / 16, 19 / 16, -1.3, 447.0, 464.0, 1e6, -1e6, 2.0**-11]
    x = torch.tensor(edges + torch.randn(300).mul(torch.exp(3 * torch.randn(300))).tolist())
    assert quantised(x, torch.ones(1)).tolist() == [nearest_code(float(v)) for v in x]
    odd = torch.tensor([math.nan, -math.nan, math.inf, -math.inf])
    assert quantised(odd, torch.ones(1)).tolist() == [0x7F] * 4
    # Finite values are cut, whatever their quotient; a scale that is none gives NaN.
    assert quantised(torch.tensor([3e38, -3e38]), torch.tensor([1e-30])).tolist() == [0x7E, 0xFE]
    assert quantised(torch.tensor([0.0, 1.0]), torch.tensor([math.nan])).tolist() == [0x7F] * 2


@pytest.mark.parametrize("powers", [True, False])
@pytest.mark.parametrize("name", ["v32", "v4"])
def test_scales_are_the_smallest_that_cut_nothing(name: str, powers: bool) -> None:
    layout, values = layout_of(name), values_of(name)
    values[0, 0, :64] = 0.0
    if name == "v4" and not powers:
        with pytest.raises(UserError, match="powers of two"):
            pack(layout, values, powers=powers)
        return
    there = fields(layout, pack(layout, values, powers=powers))
    scales = there.scales.double() if name == "v32" else ue8m0_value(there.scales)
    largest = values[..., : layout.quantised].unflatten(-1, (layout.scales, layout.tile)).abs().amax(-1).double()
    assert bool((448 * scales * (1 + 1e-6) >= largest).all())
    some = largest > 1
    assert bool((448 * scales < largest * (2 if powers else 1 + 1e-6))[some].all())
    exact = torch.frexp(scales)[0] == 0.5
    assert bool(exact.all()) if powers else not bool(exact[some].all())
    if name == "v4":
        assert float(scales[0, 0, 0]) == 2.0**-13  # of zeros


@pytest.mark.parametrize("name", LAYOUTS)
def test_what_is_packed_is_within_half_a_step_and_packs_again_to_the_same(name: str) -> None:
    layout, values = layout_of(name), values_of(name)
    cache, scale = packed(name, values)
    found = unpack(layout, cache, scale)
    wanted = values.double()
    assert torch.equal(found[..., layout.quantised :], wanted[..., layout.quantised :])
    if layout.quantised:
        there = fields(layout, cache)
        scales = (
            scale.double() if name == "flat" else there.scales.double() if name == "v32" else ue8m0_value(there.scales)
        )
        steps = scales if name == "flat" else scales.repeat_interleave(layout.tile, -1)
        x, y = found[..., : layout.quantised], wanted[..., : layout.quantised]
        # Half a unit in the last of four bits, or of the subnormals' step.
        assert bool(((x - y).abs() <= torch.maximum(y.abs() / 16, steps * 2.0**-10) * (1 + 1e-6)).all())
    # A largest value that was rounded down to 448/512 of a power of two has half the scale, and the same value.
    again = pack(layout, found, scale=scale)
    assert torch.equal(unpack(layout, again, scale), found)


@pytest.mark.parametrize("name", LAYOUTS)
def test_packing_into_pages_that_lie_apart(name: str) -> None:
    """Only what belongs to tokens is written, whatever lies between pages."""
    layout, values = layout_of(name), values_of(name)
    cache, scale = packed(name, values)
    apart = layout.page_bytes(5) + 1152
    if name == "bf16":
        memory = torch.full((3, apart // 2), -1.0, dtype=torch.bfloat16)
        out = memory[:, : 5 * 576].view(3, 5, 576)
    else:
        memory = torch.full((3, apart), 0xA5, dtype=torch.uint8)
        out = memory[:, : 5 * layout.token_bytes].view(3, 5, layout.token_bytes)
    assert pack(layout, values, scale=scale, out=out) is out
    assert torch.equal(unpack(layout, out, scale), unpack(layout, cache, scale))
    written = sum(1 for byte in memory.view(torch.uint8).flatten().tolist() if byte != 0xA5)
    if name != "bf16":
        assert written <= 15 * (layout.token_bytes - layout.padding)
    assert bool((memory[:, 5 * (layout.columns if name == "bf16" else layout.token_bytes) :] == memory[0, -1]).all())


@pytest.mark.parametrize("powers", [True, False])
@pytest.mark.parametrize("value", [math.nan, -math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", LAYOUTS)
def test_nan_and_infinities_are_nan_in_their_place_alone(name: str, value: float, powers: bool) -> None:
    """Every other byte is that of a cache with 0 in their place."""
    layout, values = LAYOUTS[name], values_of(name)
    options = {"scale": torch.full((1,), 0.25)} if name == "flat" else {"powers": powers or name != "v32"}
    places = [(0, 0, 0), (0, 0, 5), (1, 2, layout.quantised - 1), (2, 4, 200)] if layout.quantised else []
    values[2, 1, : layout.quantised] = 0.0
    odd = values.clone()
    odd[2, 1, : layout.quantised] = value  # whole rows of a scale
    for place in places:
        values[place], odd[place] = 0.0, value
    found, wanted = pack(layout, odd, **options), pack(layout, values, **options)
    codes, right = fields(layout, found).codes, fields(layout, wanted).codes
    if codes is not None and right is not None:
        for place in (*places, (2, 1, slice(layout.quantised))):
            assert bool((codes[place] == 0x7F).all())
            right[place] = 0x7F
    assert memory_of(found) == memory_of(wanted)
    read = unpack(layout, found, options.get("scale"))
    assert int(read.isnan().sum()) == int((~odd[..., : layout.quantised].isfinite()).sum()) > 0 or name == "bf16"


@pytest.mark.parametrize("name", LAYOUTS)
def test_bf16_columns_keep_nan_and_infinities(name: str) -> None:
    layout, values = LAYOUTS[name], values_of(name)
    odd = torch.tensor([math.nan, math.inf, -math.inf]).bfloat16()
    values[1, 2, -3:] = odd
    cache, scale = packed(name, values)
    read = unpack(layout, cache, scale)[1, 2, -3:]
    kept = odd.double() if layout.plain else torch.full((3,), math.nan, dtype=torch.float64)
    assert torch.equal(read.nan_to_num(7.0), kept.nan_to_num(7.0)) and bool(read[0].isnan())


def test_the_scale_of_a_whole_cache_is_that_of_its_finite_values() -> None:
    values = values_of("flat")
    largest = flat_scale(values)
    values[0, 1, 2], values[1, 1, 2], values[2, 2, 2] = math.nan, math.inf, -math.inf
    assert 0 < float(flat_scale(values)) <= float(largest)
    assert float(flat_scale(torch.full((1, 1, 576), math.nan))) == pytest.approx(1e-4)


# ---------------------------------------------------------------- what a cache may be passed as
OTHERS = ("float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu", "bool", "int8")


@pytest.mark.parametrize("name", ["v32", "v4", "flat"])
def test_codes_of_another_float8_are_refused_by_name(name: str) -> None:
    layout, values = LAYOUTS[name], values_of(name)
    cache, scale = packed(name, values)
    for dtype in (torch.uint8, torch.float8_e4m3fn, *([torch.int8] if name != "flat" else [])):
        assert torch.equal(unpack(layout, cache.view(dtype), scale), unpack(layout, cache, scale))
        assert bytes_of(layout, cache.view(dtype)).dtype == torch.uint8
        into = cache.clone().view(dtype)
        assert pack(layout, values, scale=scale, out=into) is into
    for other in OTHERS:
        if (other == "int8" and name != "flat") or not hasattr(torch, other):
            continue
        given = cache.view(getattr(torch, other))
        for call in (
            lambda x: unpack(layout, x, scale),
            lambda x: gather(layout, x, torch.zeros(1, dtype=torch.int64), scale),
            lambda x: pack(layout, values, scale=scale, out=x),
        ):
            with pytest.raises(UserError, match=f"cache is torch.{other}: a cache of layout {name} holds e4m3fn"):
                call(given)


def test_mistakes_are_named() -> None:
    v32, v4, flat = LAYOUTS["v32"], LAYOUTS["v4"], LAYOUTS["flat"]
    with pytest.raises(UserError, match=r"'v3' is unknown: did you mean 'v32'"):
        layout_of("v3")
    with pytest.raises(UserError, match="have 512 columns; these have 576"):
        pack(v4, torch.zeros(1, 1, 576))
    with pytest.raises(UserError, match="needs its one scale"):
        pack(flat, torch.zeros(1, 1, 576))
    with pytest.raises(UserError, match="leave scale out"):
        pack(v32, torch.zeros(1, 1, 576), scale=torch.ones(1))
    with pytest.raises(UserError, match="needs its one scale"):
        unpack(flat, new_cache(flat, 1, 1))
    with pytest.raises(UserError, match=r"\(pages, page, 656\)"):
        fields(v32, new_cache(v4, 1, 4))
    with pytest.raises(UserError, match="beside each other"):
        fields(v32, new_cache(v32, 1, 8)[:, ::2])
