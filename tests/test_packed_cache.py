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
    NO_ROPE,
    V41,
    beside,
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


def e2m1(half: int) -> float:
    """One sign, two exponent bits of bias 1 and one mantissa bit; neither NaN nor infinities."""
    exponent, mantissa = half >> 1 & 3, half & 1
    return (-1.0 if half & 8 else 1.0) * (mantissa * 0.5 if exponent == 0 else (2 + mantissa) * 2.0 ** (exponent - 2))


def ue8m0(code: int) -> float:
    return math.nan if code == 255 else 2.0 ** (code - 127)


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
    if name in V41:  # data and scales of a token: behind each other, or each behind those of the other tokens
        data, scales = (256, 32) if "fp4" in name else (512, 16)
        at, scales_at = begin + (data + scales) * row, begin + (data + scales) * row + data
        if "planar" in name:
            at, scales_at = begin + data * row, begin + data * page + scales * row
        if "fp4" in name:
            halves = [memory[at + i // 2] >> 4 * (i % 2) & 15 for i in range(512)]
            return [e2m1(half) * e4m3(memory[scales_at + i // 16]) for i, half in enumerate(halves)]
        return [e4m3(memory[at + i]) * ue8m0(memory[scales_at + i // 32]) for i in range(512)]
    if name.startswith("flat"):
        columns = 512 if name.endswith("no_rope") else 576
        return [e4m3(memory[begin + columns * row + i]) * scale for i in range(columns)]
    if name == "v32_no_rope":
        scales = struct.unpack("<4f", memory[begin + 528 * row + 512 : begin + 528 * row + 528])
        return [e4m3(memory[begin + 528 * row + i]) * scales[i // 128] for i in range(512)]
    at = begin + 1152 * row
    return [bf16(memory[at + 2 * i : at + 2 * i + 2]) for i in range(576)]


def memory_of(cache: Any) -> bytes:
    """Every byte from the first of the cache on, those between pages too."""
    return bytes(cache.untyped_storage().tolist())


def scales_of(name: str, cache: Any) -> Any:
    """(pages, page, scales) float64, one by one."""
    scales = fields(LAYOUTS[name], cache).scales
    if name.startswith("v32"):
        return scales.double()
    read = e4m3 if "fp4" in name else ue8m0
    return torch.tensor([read(x) for x in scales.flatten().tolist()], dtype=torch.float64).view(scales.shape)


def values_of(name: str, pages: int = 3, page: int = 5, seed: int = 0) -> Any:
    generator = torch.Generator().manual_seed(seed)
    columns = LAYOUTS[name].columns
    x = torch.randn((pages, page, columns), generator=generator)
    return (
        x * torch.exp(2 * torch.randn((pages, page, columns // 64), generator=generator)).repeat_interleave(64, -1)
    ).bfloat16()


def packed(name: str, values: Any, **options: Any) -> tuple[Any, Any]:
    scale = flat_scale(values) if LAYOUTS[name].one_scale else None
    return pack(LAYOUTS[name], values, scale=scale, **options), scale


# ---------------------------------------------------------------- sizes
@pytest.mark.parametrize(
    ("name", "columns", "size"),
    [
        ("v32", 576, 656),
        ("v4", 512, 584),
        ("flat", 576, 576),
        ("bf16", 576, 1152),
        ("v41", 512, 528),
        ("v41_fp4", 512, 288),
        ("v41_planar", 512, 528),
        ("v41_fp4_planar", 512, 288),
        ("v32_no_rope", 512, 528),
        ("flat_no_rope", 512, 512),
    ],
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


@pytest.mark.parametrize(
    ("name", "page", "size"),
    [("v41", 3, 1584), ("v41_fp4", 3, 864), ("v41_planar", 1, 1024), ("v41_planar", 64, 33792), ("v41_planar", 3, 2048),
     ("v41_fp4_planar", 1, 512), ("v41_fp4_planar", 64, 18432), ("v41_fp4_planar", 3, 1024)],
)  # fmt: skip
def test_pages_of_v41_are_padded_where_they_have_two_parts(name: str, page: int, size: int) -> None:
    assert layout_of(name).page_bytes(page) == size
    assert new_cache(layout_of(name), 3, page).stride() == (size, layout_of(name).token_bytes, 1)


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
    scale = torch.tensor([0.37]) if LAYOUTS[name].one_scale else None
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
@pytest.mark.parametrize("name", ["v32", "v4", "v41", "v41_planar"])
def test_scales_are_the_smallest_that_cut_nothing(name: str, powers: bool) -> None:
    layout, values = layout_of(name), values_of(name)
    values[0, 0, :64] = 0.0
    if name != "v32" and not powers:
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
    if name != "v32":
        assert float(scales[0, 0, 0]) == 2.0**-13  # of zeros


# ---------------------------------------------------------------- V4.1, against a writer of bytes
def nearest_half(x: float) -> int:
    """The four bits of the nearest e2m1 of the sign, the even one of two."""
    halves = range(8, 16) if math.copysign(1.0, x) < 0 else range(8)
    return min(halves, key=lambda half: (abs(e2m1(half) - x), half & 1))


def divided(x: float, y: float) -> float:
    """The float32 quotient. Quotients of float32 that are rounded to float64 first round to the same."""
    return float(struct.unpack("<f", struct.pack("<f", x / y))[0])


def write_e4m3(row: list[float]) -> tuple[bytes, bytes]:
    """Codes and scales of 512 columns, 32 to a scale: 2 to the power of ceil(log2(max(largest / 448, 1e-4)))."""
    codes, scales = bytearray(), bytearray()
    for tile in (row[i : i + 32] for i in range(0, 512, 32)):
        largest = max((abs(x) for x in tile if math.isfinite(x)), default=0.0)
        bits = next(bits for bits in range(1, 255) if ue8m0(bits) >= max(divided(largest, 448.0), divided(1e-4, 1.0)))
        scales.append(bits)
        codes += bytes(nearest_code(divided(x, ue8m0(bits))) if math.isfinite(x) else 0x7F for x in tile)
    return bytes(codes), bytes(scales)


def write_e2m1(row: list[float]) -> tuple[bytes, bytes]:
    """Codes and scales of 512 columns, 16 to a scale: largest / 6, from 2^-9 to 448, in e4m3; NaN where one of the
    columns is none."""
    halves, scales = list[int](), bytearray()
    for tile in (row[i : i + 16] for i in range(0, 512, 16)):
        if not all(map(math.isfinite, tile)):
            scales.append(0x7F)
            halves += [0] * 16
            continue
        code = nearest_code(min(max(divided(max(map(abs, tile)), 6.0), 2.0**-9), 448.0))
        scales.append(code)
        halves += [nearest_half(divided(x, e4m3(code))) for x in tile]
    return bytes(halves[i] | halves[i + 1] << 4 for i in range(0, 512, 2)), bytes(scales)


def written(name: str, values: Any) -> bytes:
    """The whole memory of a cache, 0 where it holds nothing."""
    write = write_e2m1 if "fp4" in name else write_e4m3
    memory = bytearray()
    for page in values.float().tolist():
        rows = [write(row) for row in page]
        if "planar" in name:
            memory += b"".join(codes for codes, _ in rows) + b"".join(scales for _, scales in rows)
            memory += bytes(-len(memory) % (256 if "fp4" in name else 512))
        else:
            memory += b"".join(codes + scales for codes, scales in rows)
    return bytes(memory)


def hostile(page: int) -> Any:
    """(2, page, 512): magnitudes of all kinds, ties, zeros of both signs, NaN and infinities."""
    values = values_of("v41", 2, page, seed=page).float()
    if page > 1:
        values[0, 0] = 0.0
        values[0, 1] = -0.0
        values[1, 0] *= 2.0**-20  # below the smallest scales
        values[1, 1] *= 2.0**13  # e2m1's scales end at 448
    values[0, -1, 100:116] = torch.linspace(-6.0, 6.0, 16)
    values[0, -1, 128:144] = torch.tensor(
        [6.0, 0.25, -0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, -5.0, 0.1, -0.1] + [0] * 4
    )
    values[0, -1, 192:224] = torch.tensor([448.0, 449.0] + [17 / 16, 19 / 16] * 15)
    values[0, -1, 224:256] = 448.0
    for place, odd in ((3, math.nan), (40, math.inf), (70, -math.inf), (511, -math.nan)):
        values[1, -1, place] = odd
    values[1, -1, 256:288] = math.nan
    return values


@pytest.mark.parametrize("page", [1, 3, 4])
@pytest.mark.parametrize("name", V41)
def test_a_cache_of_v41_is_what_another_writer_writes(name: str, page: int) -> None:
    layout, values = layout_of(name), hostile(page)
    assert memory_of(pack(layout, values)) == written(name, values)
    some = values.bfloat16()
    assert memory_of(pack(layout, some)) == written(name, some)
    found = unpack(layout, pack(layout, values))
    if layout.bits == 4:
        odd = (~values.isfinite()).unflatten(-1, (-1, 16)).any(-1, keepdim=True).expand(-1, -1, -1, 16).flatten(-2)
        assert torch.equal(found.isnan(), odd) and 80 < int(odd.sum()) < 200
    else:
        assert torch.equal(found.isnan(), ~values.isfinite())
    again = pack(layout, found)
    assert torch.equal(unpack(layout, again).nan_to_num(7.0), found.nan_to_num(7.0)) or layout.bits == 4


def test_a_planar_page_holds_the_bytes_of_its_tokens_in_another_order() -> None:
    for name, data in (("v41", 512), ("v41_fp4", 256)):
        values = hostile(4)
        rows = pack(layout_of(name), values)
        planar = pack(layout_of(f"{name}_planar"), values)
        for page in range(2):
            memory = planar.as_strided((2, planar.stride(0)), (planar.stride(0), 1))[page]
            assert torch.equal(memory[: 4 * data].view(4, data), rows[page, :, :data])
            scales = rows.shape[2] - data
            assert torch.equal(memory[4 * data : 4 * (data + scales)].view(4, scales), rows[page, :, data:])


def test_which_layouts_an_extra_cache_may_have() -> None:
    assert [beside(name, "").name for name in LAYOUTS if "fp4" not in name] == [n for n in LAYOUTS if "fp4" not in n]
    assert beside("v41", "v41_fp4").name == "v41_fp4" and beside("v41", "v41").name == "v41"
    assert beside("v41_planar", "v41_fp4_planar").columns == 512
    for main, extra, words in (
        ("v41_fp4", "", "layout v41_fp4 is for an extra cache: the cache itself has layout v41"),
        ("v41_fp4_planar", "v41_fp4_planar", "the cache itself has layout v41_planar"),
        ("v41", "v4", "extra cache of layout v4 does not go beside layout v41: it has layout v41 or v41_fp4"),
        ("v4", "v41_fp4", "v41_fp4 does not go beside layout v4: it has layout v4"),
        ("v41", "v41_fp4_planar", "does not go beside layout v41"),
        ("v41", "v3", "'v3' is unknown"),
        (["v41"], "", r"layout \['v41'\] is unknown"),
        ("v41", ["v41"], r"layout \['v41'\] is unknown"),
    ):
        with pytest.raises(UserError, match=words):
            beside(main, extra)


@pytest.mark.parametrize("name", LAYOUTS)
def test_what_is_packed_is_within_half_a_step_and_packs_again_to_the_same(name: str) -> None:
    layout, values = layout_of(name), values_of(name)
    cache, scale = packed(name, values)
    found = unpack(layout, cache, scale)
    wanted = values.double()
    assert torch.equal(found[..., layout.quantised :], wanted[..., layout.quantised :])
    if layout.quantised:
        scales = scale.double() if layout.one_scale else scales_of(name, cache)
        steps = scales if layout.one_scale else scales.repeat_interleave(layout.tile, -1)
        x, y = found[..., : layout.quantised], wanted[..., : layout.quantised]
        # Half a unit in the last of four bits (of two, in e2m1), or of the subnormals' step. The scale of e2m1 columns
        # is rounded, and may cut the largest of them.
        relative, step = (1 / 4, 0.25) if layout.bits == 4 else (1 / 16, 2.0**-10)
        assert bool(((x - y).abs() <= torch.maximum(y.abs() * relative, steps * step) * (1 + 1e-6)).all())
    if layout.bits == 4:  # the largest may be cut or rounded to 4 or 5 scales, whose own scale is another
        return
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
@pytest.mark.parametrize("name", [name for name in LAYOUTS if LAYOUTS[name].bits == 8])
def test_nan_and_infinities_are_nan_in_their_place_alone(name: str, value: float, powers: bool) -> None:
    """Every other byte is that of a cache with 0 in their place."""
    layout, values = LAYOUTS[name], values_of(name)
    options = {"scale": torch.full((1,), 0.25)} if layout.one_scale else {"powers": powers or layout.scale_bytes != 4}
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


@pytest.mark.parametrize("name", ["v32", "v4", "flat", *V41, *NO_ROPE])
def test_codes_of_another_float8_are_refused_by_name(name: str) -> None:
    layout, values = LAYOUTS[name], values_of(name)
    cache, scale = packed(name, values)
    for dtype in (torch.uint8, torch.float8_e4m3fn, *([] if LAYOUTS[name].one_scale else [torch.int8])):
        assert torch.equal(unpack(layout, cache.view(dtype), scale), unpack(layout, cache, scale))
        assert bytes_of(layout, cache.view(dtype)).dtype == torch.uint8
        into = cache.clone().view(dtype)
        assert pack(layout, values, scale=scale, out=into) is into
    for other in OTHERS:
        if (other == "int8" and not LAYOUTS[name].one_scale) or not hasattr(torch, other):
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
    with pytest.raises(UserError, match="v41_fp4 has e4m3 numbers for scales"):
        pack(LAYOUTS["v41_fp4"], torch.zeros(1, 1, 512), powers=False)
    with pytest.raises(UserError, match=r"\(pages, page, 288\)"):
        fields(LAYOUTS["v41_fp4"], new_cache(LAYOUTS["v41"], 1, 4))
    with pytest.raises(UserError, match="beside each other"):
        fields(v32, new_cache(v32, 1, 8)[:, ::2])
