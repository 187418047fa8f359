"""Byte layouts of latent caches: what a token's bytes are, packing into them and unpacking.

    v32    656 bytes a token: 512 e4m3 columns | 4 float32 scales, each of 128 columns | 64 bf16 columns
    v4     584 bytes a token, a page in two parts: its N rows of 576 bytes (448 e4m3 columns | 64 bf16 columns), then
           its N rows of 8 bytes (7 ue8m0 scales, each of 64 columns | 1 that nobody reads). A page takes a multiple
           of 576 bytes
    flat   576 bytes a token: 576 e4m3 columns. One float32 scale for the whole cache is kept beside it
    bf16   1152 bytes a token: 576 bf16 columns

    v32_no_rope     528 bytes a token: 512 e4m3 columns | 4 float32 scales, each of 128 columns
    flat_no_rope    512 bytes a token: 512 e4m3 columns. One float32 scale for the whole cache is kept beside it

    v41             528 bytes a token: 512 e4m3 columns | 16 ue8m0 scales, each of 32 columns
    v41_fp4         288 bytes a token: 512 e2m1 columns, two in a byte, the even one in its low half | 32 e4m3 scales,
                    each of 16 columns. For the extra cache beside one of layout v41 alone
    v41_planar      528 bytes a token, a page in two parts as in v4: its N rows of 512 bytes, then its N rows of 16
                    scales. A page takes a multiple of 512 bytes
    v41_fp4_planar  288 bytes a token: likewise N rows of 256 bytes, then N rows of 32 scales, and a multiple of 256

A cached column is its e4m3 or e2m1 code times the scale that it shares; bf16 columns have none. The first 512 columns
of a token are its latent, the value of attention; all of them are the key. v32 is what DeepSeek V3.2 and v4 what
DeepSeek V4 attend to sparsely. DeepSeek V4.1 quantises the rope columns too, which are the last 64 of its 512. FlashMLA
reads its tokens as in v41 and v41_fp4; SGLang's pool keeps the same bytes of a page in the order of the planar layouts.
Models without rope columns, as GLM-5.3-Flash, have a latent alone: SGLang caches it as in v32_no_rope, and vLLM, for
FlashInfer, as in flat_no_rope.

NaN and infinities. e4m3 has one NaN of either sign and no infinity. A column that is NaN, +inf or -inf is cached as the
code 0x7F, which reads as NaN, in every layout with e4m3 columns: an infinity is not cut to 448, so that it stays
visible. Scales are those of the finite columns that share them, so that the other columns of the token are cached as
if the odd one were 0; no scale is ever NaN or infinite. e2m1 has neither NaN nor infinity: there the scale of such a
column is e4m3's NaN, 0x7F, and the codes of its 16 columns are 0. A finite column that is larger than 448 times the
scale of layout flat is cut to 448 of its sign. bf16 columns keep their infinities and NaN; the bits of such a NaN may
differ between writers. All who write a cache write these bytes: `pack`, and each version of packed_append.

A cache is a tensor (pages, page, bytes of a token) of uint8 or float8_e4m3fn (`bytes_of`), or (pages, page, 576) of
bf16. Pages may lie further apart than they are long; the rows of a page may not. Where a page has two parts that shape
counts bytes and says nothing of where they are: `fields` does, for all layouts.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from mla_var3.errors import UserError, nearest

if TYPE_CHECKING:
    import torch

#: Columns of a value: the first ones of every token.
VALUES = 512
#: Largest finite e4m3, the code that is written for NaN, and the smallest scale: that of columns which are all 0.
E4M3_MAX = 448.0
E4M3_NAN = 0x7F
SCALE_MIN = 1e-4
#: Largest e2m1, and the smallest scale of such columns, which is the smallest e4m3.
E2M1_MAX = 6.0
E2M1_SCALE_MIN = 2.0**-9

#: Columns that are packed at a time: their float32 copies take 512 MB each.
_CHUNK = 1 << 27


@dataclass(frozen=True)
class Layout:
    """quantised: columns that are codes, which come first. plain: bf16 columns behind them. tile: columns that share a
    scale; 0 where the whole cache has one, or none. scale_bytes: of one. padding: bytes of a token that nobody reads.
    bits: of a code, 8 of e4m3 or 4 of e2m1. planar: whether a page has the data of all its tokens in front of all their
    scales. alignment: a page takes a multiple of these many bytes. beside: other layouts that an extra cache may have
    beside it. extra_only: whether it is for extra caches alone."""

    name: str
    quantised: int
    plain: int
    tile: int = 0
    scale_bytes: int = 0
    padding: int = 0
    bits: int = 8
    planar: bool = False
    alignment: int = 1
    beside: tuple[str, ...] = ()
    extra_only: bool = False

    @property
    def columns(self) -> int:
        """Of a key."""
        return self.quantised + self.plain

    @property
    def code_bytes(self) -> int:
        """Of a token's codes."""
        return self.quantised * self.bits // 8

    @property
    def scales(self) -> int:
        """Scales of a token."""
        return self.quantised // self.tile if self.tile else 0

    @property
    def one_scale(self) -> bool:
        """Whether the whole cache has one scale, which is kept beside it."""
        return self.quantised > 0 and not self.tile

    @property
    def has_powers(self) -> bool:
        """Whether scales are ue8m0, which has powers of two alone."""
        return self.scale_bytes == 1 and self.bits == 8

    @property
    def token_bytes(self) -> int:
        return self.code_bytes + 2 * self.plain + self.scales * self.scale_bytes + self.padding

    def page_bytes(self, page: int) -> int:
        """Bytes from one page of `page` tokens to the next."""
        return -(-page * self.token_bytes // self.alignment) * self.alignment


_V41 = Layout("v41", quantised=512, plain=0, tile=32, scale_bytes=1, beside=("v41_fp4",))
_FP4 = Layout("v41_fp4", quantised=512, plain=0, tile=16, scale_bytes=1, bits=4, extra_only=True)
LAYOUTS = {
    layout.name: layout
    for layout in (
        Layout("v32", quantised=512, plain=64, tile=128, scale_bytes=4),
        Layout("v4", quantised=448, plain=64, tile=64, scale_bytes=1, padding=1, planar=True, alignment=576),
        Layout("flat", quantised=576, plain=0),
        Layout("bf16", quantised=0, plain=576),
        _V41,
        _FP4,
        replace(_V41, name="v41_planar", planar=True, alignment=512, beside=("v41_fp4_planar",)),
        replace(_FP4, name="v41_fp4_planar", planar=True, alignment=256),
        Layout("v32_no_rope", quantised=512, plain=0, tile=128, scale_bytes=4),
        Layout("flat_no_rope", quantised=512, plain=0),
    )
}
#: Those of V4.1, and those of models without rope columns, which versions take only if they say so.
V41 = tuple(name for name in LAYOUTS if name.startswith("v41"))
NO_ROPE = tuple(name for name in LAYOUTS if name.endswith("no_rope"))


def layout_of(name: Any) -> Layout:
    """A layout by its name; a `UserError` names the nearest."""
    if not isinstance(name, str) or name not in LAYOUTS:
        raise UserError(f"cache layout {name!r} is unknown: {nearest(str(name), LAYOUTS)}.")
    return LAYOUTS[name]


def beside(layout: Any, extra: Any) -> Layout:
    """The layout of an extra cache, by its name, beside a cache of another; "" for the same. Raises `UserError` where
    the two do not go together, or the first is for extra caches alone."""
    main = layout_of(layout)
    if main.extra_only:
        mains = " or ".join(other.name for other in LAYOUTS.values() if layout in other.beside)
        raise UserError(f"layout {layout} is for an extra cache: the cache itself has layout {mains}.")
    if extra in ("", layout):
        return main
    if layout_of(extra).name not in main.beside:
        allowed = " or ".join((main.name, *main.beside))
        raise UserError(
            f"an extra cache of layout {extra} does not go beside layout {layout}: it has layout {allowed}."
        )
    return layout_of(extra)


@dataclass(frozen=True)
class Fields:
    """Views of a cache, each (pages, page, its columns), None where the layout has none. codes: uint8, the bits of
    e4m3, or of two e2m1. scales: float32 in v32, uint8 (the bits of ue8m0, and beside e2m1 of e4m3) elsewhere. plain:
    bf16."""

    codes: torch.Tensor | None
    scales: torch.Tensor | None
    plain: torch.Tensor | None


def new_cache(layout: Layout, pages: int, page: int, device: Any = "cpu") -> torch.Tensor:
    """An uninitialised cache (pages, page, bytes of a token), or (pages, page, 576) of bf16."""
    import torch

    if layout.name == "bf16":
        return torch.empty((pages, page, layout.columns), dtype=torch.bfloat16, device=device)
    memory = torch.empty((pages, layout.page_bytes(page)), dtype=torch.uint8, device=device)
    return memory[:, : page * layout.token_bytes].view(pages, page, layout.token_bytes)


def bytes_of(layout: Layout, cache: torch.Tensor, name: str = "a cache") -> torch.Tensor:
    """A view as uint8 of a cache of a layout with codes; of layout bf16 the cache as it is.

    Codes are e4m3fn, so that a cache is uint8 or float8_e4m3fn; where tokens are bytes of several kinds, in all layouts
    but flat and flat_no_rope, int8 too, as FlashMLA takes it. Raises `UserError` for every other dtype: one of 8 bits
    would be read as numbers that it does not hold. name: of the caller's argument.
    """
    import torch

    if layout.name == "bf16":
        return cache
    plain_bytes = (torch.uint8, torch.int8) if layout.tile else (torch.uint8,)
    if cache.dtype not in (torch.float8_e4m3fn, *plain_bytes):
        raise UserError(
            f"{name} is {cache.dtype}: a cache of layout {layout.name} holds e4m3fn codes, so pass it as torch.uint8 "
            "or torch.float8_e4m3fn."
        )
    return cache.view(torch.uint8)


def fields(layout: Layout, cache: torch.Tensor) -> Fields:
    """Where codes, scales and bf16 columns of each token are. Raises `UserError` for a tensor of another layout."""
    import torch

    cache = bytes_of(layout, cache)
    bf16 = layout.name == "bf16"
    row = layout.columns if bf16 else layout.token_bytes
    dtype = torch.bfloat16 if bf16 else torch.uint8
    if cache.dim() != 3 or cache.shape[2] != row or cache.dtype != dtype:
        wanted = f"(pages, page, {row}) of {dtype}"
        raise UserError(f"a cache of layout {layout.name} is {wanted}; this is {tuple(cache.shape)} of {cache.dtype}.")
    if cache.stride(2) != 1 or cache.stride(1) != row:
        raise UserError(f"a cache has strides {cache.stride()}: the rows of a page must lie beside each other.")
    if bf16:
        return Fields(None, None, cache)
    # Float32 scales and bf16 columns lie between the bytes.
    if layout.tile and (cache.storage_offset() % 4 or (len(cache) > 1 and cache.stride(0) % 4)):
        raise UserError(
            f"a cache of layout {layout.name} begins {cache.storage_offset()} bytes into its memory with pages "
            f"{cache.stride(0)} bytes apart: both must be multiples of 4."
        )
    pages, page, _ = cache.shape

    def part(begin: int, apart: int, width: int) -> torch.Tensor:
        """`width` bytes of each token, `apart` bytes from one to the next, from byte `begin` of the page on."""
        return cache.as_strided((pages, page, width), (cache.stride(0), apart, 1), cache.storage_offset() + begin)

    if layout.one_scale:
        return Fields(cache, None, None)
    scale_bytes, plain = layout.scales * layout.scale_bytes, 2 * layout.plain
    if layout.planar:
        data = layout.code_bytes + plain
        codes, rope = part(0, data, layout.code_bytes), part(layout.code_bytes, data, plain)
        scales = part(page * data, scale_bytes + layout.padding, scale_bytes)
    else:
        codes, scales = cache[..., : layout.code_bytes], part(layout.code_bytes, row, scale_bytes)
        rope = part(layout.code_bytes + scale_bytes, row, plain)
    if layout.scale_bytes == 4:
        scales = scales.view(torch.float32)
    return Fields(codes, scales, rope.view(torch.bfloat16) if layout.plain else None)


def pack(
    layout: Layout,
    values: torch.Tensor,
    *,
    scale: torch.Tensor | None = None,
    powers: bool = True,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """The cache of values (pages, page, columns) of a floating dtype, in `out` where it is given.

    `encoded` has scales and codes. powers: whether scales of v32 are rounded up to powers of two. scale: (1,) float32,
    of layout flat, which needs one: `flat_scale`. Bytes that belong to nobody are 0 in a new cache and left alone in
    `out`.
    """
    if values.dim() != 3:
        raise UserError(f"values are {tuple(values.shape)}: pass (pages, tokens of a page, columns).")
    pages, page, columns = values.shape
    if columns != layout.columns:
        raise UserError(f"tokens of layout {layout.name} have {layout.columns} columns; these have {columns}.")
    if (scale is None) == layout.one_scale:
        wanted = "needs its one scale" if scale is None else "has scales of its own: leave scale out"
        raise UserError(f"layout {layout.name} {wanted}.")
    if layout.scale_bytes == 1 and not powers:
        kind = "powers of two" if layout.has_powers else "e4m3 numbers"
        raise UserError(f"layout {layout.name} has {kind} for scales: leave powers as it is.")
    if out is None:
        out = new_cache(layout, pages, page, values.device)
        if layout.planar:
            out.as_strided((pages, layout.page_bytes(page)), (out.stride(0), 1)).zero_()
    target = fields(layout, out)
    if target.plain is not None:
        target.plain.copy_(values[..., layout.quantised :])
    if target.codes is None or not values.numel():
        return out
    step = max(1, _CHUNK // (page * columns))
    for begin in range(0, pages, step):
        part = slice(begin, begin + step)
        x = values[part, :, : layout.quantised].float()
        if target.scales is None:
            assert scale is not None
            target.codes[part] = quantised(x, scale)
        else:
            target.codes[part], target.scales[part] = encoded(layout, x, powers)
    return out


def encoded(layout: Layout, x: torch.Tensor, powers: bool = True) -> tuple[torch.Tensor, torch.Tensor]:
    """(codes, scales) of float32 columns (..., a multiple of the layout's tile), of a layout with scales in its tokens,
    in the types of `Fields`.

    e4m3 columns: a scale is the largest magnitude of its finite columns over 448, and at least `SCALE_MIN`, rounded up
    to a power of two unless `powers` is False (ue8m0 has no others). A code is the float32 quotient of value and scale,
    rounded to the nearest e4m3 (ties to even), at most 448; of NaN and infinities it is `E4M3_NAN`.

    e2m1 columns: a scale is the largest magnitude over 6, from `E2M1_SCALE_MIN` to 448, rounded to the nearest e4m3. A
    code is the float32 quotient of value and scale, rounded to the nearest e2m1 (ties to even), at most 6; what rounds
    to zero keeps its sign. Where one of the columns is NaN or infinite, the scale is `E4M3_NAN` and all codes are 0.
    """
    import torch

    tiles = x.unflatten(-1, (-1, layout.tile))
    if layout.bits == 8:
        scales = _scales(tiles, powers)
        codes = quantised(tiles, scales.unsqueeze(-1)).flatten(-2)
        return codes, scales if layout.scale_bytes == 4 else ue8m0_of(scales)
    odd = ~tiles.isfinite().all(-1)
    largest = _finite(tiles).abs().amax(-1) / tiles.new_tensor(E2M1_MAX)  # by a tensor, as in `_scales`
    bits = largest.clamp(E2M1_SCALE_MIN, E4M3_MAX).to(torch.float8_e4m3fn)
    halves = _e2m1_of(tiles / bits.float().unsqueeze(-1)).masked_fill_(odd.unsqueeze(-1), 0).flatten(-2)
    pairs = halves.unflatten(-1, (-1, 2))
    return pairs[..., 0] | pairs[..., 1] << 4, bits.view(torch.uint8).masked_fill(odd, E4M3_NAN)


def _e2m1_of(x: torch.Tensor) -> torch.Tensor:
    """uint8, the four bits of the nearest e2m1 (ties to even) of float32 numbers, at most 6."""
    import torch

    size = x.abs().clamp(max=E2M1_MAX)
    step = torch.where(size < 2.0, 0.5, torch.where(size < 4.0, 1.0, 2.0))
    rounded = torch.round(size / step) * step
    magnitudes = torch.tensor(_E2M1, device=x.device)
    return torch.searchsorted(magnitudes, rounded.contiguous()).to(torch.uint8) | x.signbit().to(torch.uint8) << 3


#: Magnitudes of e2m1, by the three low bits of a code; the fourth is the sign.
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def flat_scale(values: torch.Tensor) -> torch.Tensor:
    """(1,) float32: the one scale of layout flat with which no finite value is cut; the smallest one of no values."""
    if not values.numel():
        return values.new_full((1,), SCALE_MIN).float()
    return (_finite(values).abs().amax().float() / E4M3_MAX).clamp(min=SCALE_MIN).view(1)


def _finite(values: torch.Tensor) -> torch.Tensor:
    """0 in the place of NaN and infinities."""
    return values.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)


def _scales(tiles: torch.Tensor, powers: bool) -> torch.Tensor:
    """(..., scales) float32 of (..., scales, tile)."""
    import torch

    # By a tensor: a GPU divides by a number by multiplying with its reciprocal, which rounds once more.
    scales = (_finite(tiles).abs().amax(-1) / tiles.new_tensor(E4M3_MAX)).clamp(min=SCALE_MIN)
    if not powers:
        return scales
    fraction, exponent = torch.frexp(scales)
    up = torch.where(fraction == 0.5, exponent - 1, exponent)
    # By its bits: a GPU's powers are off by units in the last place.
    return (up.int() + 127 << 23).view(torch.float32)


def quantised(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """uint8, the bits of e4m3, of float32 values over their scales; `E4M3_NAN` where a value is not finite, or its
    quotient is NaN."""
    import torch

    over = x / scale
    odd = over.isnan() | x.isinf()
    # What torch makes of larger values, and of NaN, differs between devices and versions.
    codes = over.clamp_(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn).view(torch.uint8)
    return codes.masked_fill_(odd, E4M3_NAN)


def ue8m0_of(scales: torch.Tensor) -> torch.Tensor:
    """uint8, the bits of ue8m0, of float32 powers of two from 2^-126 on; NaN is 255."""
    import torch

    return (scales.contiguous().view(torch.int32) >> 23 & 0xFF).to(torch.uint8)


def ue8m0_value(bits: torch.Tensor) -> torch.Tensor:
    """float64: 2^(bits - 127), NaN of 255."""
    import torch

    exponent = bits.long() - 127 + 1023
    return torch.where(bits == 255, math.nan, (exponent << 52).view(torch.float64))


def unpack(layout: Layout, cache: torch.Tensor, scale: torch.Tensor | None = None) -> torch.Tensor:
    """(pages, page, columns) float64: exactly what the bytes say. scale: (1,), of layout flat."""
    return _values(layout, fields(layout, cache), scale)


def gather(
    layout: Layout, cache: torch.Tensor, tokens: torch.Tensor, scale: torch.Tensor | None = None
) -> torch.Tensor:
    """(n, columns) float64 of n tokens, given as page · tokens of a page + row. scale: (1,), of layout flat."""
    at = tokens.long() // cache.shape[1], tokens.long() % cache.shape[1]
    there = fields(layout, cache)
    found = (None if x is None else x[at] for x in (there.codes, there.scales, there.plain))
    return _values(layout, Fields(*found), scale)


def _values(layout: Layout, there: Fields, scale: torch.Tensor | None) -> torch.Tensor:
    import torch

    parts = []
    if there.codes is not None:
        x = _code_values(layout, there.codes)
        if there.scales is not None:
            if layout.scale_bytes == 4:
                scales = there.scales.double()
            elif layout.has_powers:
                scales = ue8m0_value(there.scales)
            else:
                scales = there.scales.contiguous().view(torch.float8_e4m3fn).double()
            x = (x.unflatten(-1, (layout.scales, layout.tile)) * scales.unsqueeze(-1)).flatten(-2)
        else:
            if scale is None:
                raise UserError(f"layout {layout.name} needs its one scale.")
            x = x * scale.double()
        parts.append(x)
    if there.plain is not None:
        parts.append(there.plain.double())
    return torch.cat(parts, dim=-1)


def _code_values(layout: Layout, codes: torch.Tensor) -> torch.Tensor:
    """(..., quantised columns) float64 of bytes (..., bytes of codes)."""
    import torch

    if layout.bits == 8:
        return codes.contiguous().view(torch.float8_e4m3fn).float().double()
    halves = torch.stack((codes & 0xF, codes >> 4), dim=-1).flatten(-2)
    magnitudes = torch.tensor(_E2M1, dtype=torch.float64, device=codes.device)[(halves & 7).long()]
    return torch.where(halves >= 8, -magnitudes, magnitudes)
