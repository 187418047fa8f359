"""packed_append v0 in Triton: rotates new tokens' q and k, and writes latent and rope into a packed cache.

A program has one token and either `heads` of its query heads, or, first, its key:

    q       position → cosines, sines (float32)     x, y of a pair → x cos - y sin, y cos + x sin → out
    latent  columns that share a scale → largest finite magnitude / 448 → scale → column / scale → e4m3 → cache[slot]
    rope    turned as q, rounded to bf16 → cache[slot]; of layout flat to e4m3 from there, of V4.1's as the latent

In layout v41_fp4 codes are e2m1, two in a byte, and a scale is the largest magnitude / 6, in e4m3. Both kinds of codes
are made by integer arithmetic, so any device and Triton's interpreter give the same bits; NaN and infinities become
e4m3's NaN, of the column or, where that is an e2m1, of its scale. A key whose slot is outside of the cache is not
stored; a position outside of the table turns by NaN. Caches without rope columns have a kernel of their own,
`latent_append`, a program of which has a latent. Runs on sm_80 and later. The base version; rotation as in rope_append.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl

from mla_var3.device import Requirement
from mla_var3.kernel.triton.prims.numerics import interpreted, round_to
from mla_var3.kernel.triton.prims.rotary import load_turns, put, store_pairs, turned
from mla_var3.packed_cache import E4M3_NAN, SCALE_MIN
from mla_var3.runtime import KernelPlan, Tiling, TritonKernel, Verdict, limits
from mla_var3.workload import packed_append as append

if TYPE_CHECKING:
    from mla_var3.device import Device
    from mla_var3.workload.packed_append import PackedAppendProblem


@dataclass(frozen=True)
class PackedAppendTiling(Tiling):
    """heads: of a program, a power of two. num_warps: of a program: 1, 2, 4 or 8."""

    heads: int = 16
    num_warps: int = 4

    def validate(self, pd: PackedAppendProblem, device: Device | None = None) -> Verdict:
        if not 1 <= self.heads <= 128 or self.heads & (self.heads - 1):
            return Verdict.no(f"heads = {self.heads} must be a power of two of up to 128")
        if self.num_warps not in (1, 2, 4, 8):
            return Verdict.no(f"num_warps = {self.num_warps} must be 1, 2, 4 or 8")
        if pd.no_rope:
            return Verdict.yes()
        return limits.grid(1 + -(-pd.h // self.heads), f"blocks of the {pd.h:,} heads of q")


INFINITE = tl.constexpr(0x7F800000)
NAN = tl.constexpr(E4M3_NAN)


@triton.jit
def size_of(x):
    """uint32, the bits of float32's magnitude: those of infinity are INFINITE, of NaN more."""
    return x.to(tl.uint32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def quotient(x, scale):
    """x / scale, rounded once; NaN where x is infinite."""
    return tl.where(size_of(x) == INFINITE, float("nan"), tl.div_rn(x, scale))


@triton.jit
def e4m3(x):
    """uint8, the bits of the nearest e4m3 (ties to even) of float32, at most 448; NAN of NaN."""
    bits = x.to(tl.uint32, bitcast=True)
    sign = (bits >> 24) & 0x80
    odd = size_of(x) > INFINITE
    size = tl.minimum(tl.abs(x), 448.0)
    # Below 2^-6 codes are multiples of 2^-9: adding 2^14 leaves just these in the mantissa.
    small = (size + 16384.0).to(tl.uint32, bitcast=True) & 0xFF
    bits = size.to(tl.uint32, bitcast=True)
    large = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - (120 << 3)
    return tl.where(odd, NAN, sign | tl.where(size < 0.015625, small, large)).to(tl.uint8)


@triton.jit
def e2m1(x):
    """uint32, the four bits of the nearest e2m1 (ties to even) of float32, at most 6; the sign of what becomes 0."""
    sign = (x.to(tl.uint32, bitcast=True) >> 28) & 8
    size = tl.minimum(tl.abs(x), 6.0)
    # Below 1 codes are multiples of 0.5: adding 2^22 leaves just these in the mantissa.
    small = (size + 4194304.0).to(tl.uint32, bitcast=True) & 0xF
    bits = size.to(tl.uint32, bitcast=True)
    large = ((bits + 0x1FFFFF + ((bits >> 22) & 1)) >> 22) - (126 << 1)
    return sign | tl.where(size < 1.0, small, large)


@triton.jit
def value_of(code):
    """float32 of a positive e4m3, given as its bits in uint32."""
    normal = ((code << 20) + (120 << 23)).to(tl.float32, bitcast=True)
    return tl.where(code < 8, code.to(tl.float32) * 0.001953125, normal)


@triton.jit
def coded(x, BITS: tl.constexpr, SCALE_MIN: tl.constexpr):
    """Codes (tiles, bytes of a tile) and bits of the scales (tiles,), uint8, of columns (tiles, columns) in layouts of
    V4.1: e4m3 and ue8m0, or two e2m1 in a byte and e4m3."""
    TILES: tl.constexpr = x.shape[0]
    TILE: tl.constexpr = x.shape[1]
    largest = tl.max(tl.where(size_of(x) < INFINITE, tl.abs(x), 0.0), axis=1)
    if BITS == 8:
        least = tl.maximum(tl.div_rn(largest, tl.full([TILES], 448.0, tl.float32)), SCALE_MIN)
        bits = (least.to(tl.uint32, bitcast=True) + 0x7FFFFF) >> 23
        scales = (bits << 23).to(tl.float32, bitcast=True)
        return e4m3(quotient(x, tl.broadcast_to(scales[:, None], (TILES, TILE)))), bits.to(tl.uint8)
    else:
        odd = tl.max((size_of(x) >= INFINITE).to(tl.int32), axis=1) > 0
        exact = tl.div_rn(largest, tl.full([TILES], 6.0, tl.float32))
        bits = e4m3(tl.minimum(tl.maximum(exact, 0.001953125), 448.0))
        scales = value_of(bits.to(tl.uint32))
        codes = e2m1(tl.div_rn(x, tl.broadcast_to(scales[:, None], (TILES, TILE))))
        even, uneven = tl.split(tl.reshape(tl.where(odd[:, None], 0, codes), (TILES, TILE // 2, 2)))
        return (even | (uneven << 4)).to(tl.uint8), tl.where(odd, NAN, bits).to(tl.uint8)


@triton.jit
def scales_of(x, POWERS: tl.constexpr, SCALE_MIN: tl.constexpr):
    """(tiles,) float32, the scales of columns (tiles, columns) of e4m3."""
    largest = tl.max(tl.where(size_of(x) < INFINITE, tl.abs(x), 0.0), axis=1)
    scales = tl.maximum(tl.div_rn(largest, tl.full([x.shape[0]], 448.0, tl.float32)), SCALE_MIN)
    if POWERS:
        up = scales.to(tl.uint32, bitcast=True) + 0x7FFFFF
        scales = ((up >> 23) << 23).to(tl.float32, bitcast=True)
    return scales


@triton.jit(do_not_specialize=["cache_rows"])
def latent_append(
    Latent,  # (n, K), rows `apart` elements apart, global
    Slots,  # (n,)
    Scale,  # (1,) float32 of layout flat_no_rope, else Scales
    Codes,  # uint8, of row r of page g at g * code_page + r * CODE_ROW
    Scales,  # int32, likewise
    apart,  # a multiple of 16 where vectors are to be loaded
    code_page,
    scale_page,
    cache_rows,
    PAGE: tl.constexpr,
    CODE_ROW: tl.constexpr,
    SCALE_ROW: tl.constexpr,
    TILES: tl.constexpr,  # of a latent
    TILE: tl.constexpr,  # columns that share a scale
    FLAT: tl.constexpr,
    POWERS: tl.constexpr,
    SCALE_MIN: tl.constexpr,
):
    """Grid (n,)."""
    token = tl.cast(tl.program_id(0), tl.int64)
    slot = tl.cast(tl.load(Slots + token), tl.int64)
    page, at = slot // PAGE, slot % PAGE
    tile = tl.arange(0, TILES)
    column = tile[:, None] * TILE + tl.arange(0, TILE)[None, :]
    slots = tl.zeros([TILES], tl.int64) + slot
    written = (slots >= 0) & (slots < cache_rows)
    latent = tl.load(Latent + token * apart + column).to(tl.float32)
    if FLAT:
        scales = tl.zeros([TILES], tl.float32) + tl.load(Scale)
    else:
        scales = scales_of(latent, POWERS, SCALE_MIN)
        to_scales = Scales + page * scale_page + at * SCALE_ROW
        tl.store(to_scales + tile, scales.to(tl.int32, bitcast=True), mask=written)
    codes = e4m3(quotient(latent, tl.broadcast_to(scales[:, None], (TILES, TILE))))
    tl.store(Codes + page * code_page + at * CODE_ROW + column, codes, mask=written[:, None])


@triton.jit(do_not_specialize=["table_rows", "cache_rows"])
def packed_append(
    Q,  # (n, H, COLUMNS), contiguous, global
    Latent,  # (n, K), contiguous, global
    Rope,  # (n, P), rows `apart` elements apart, global
    Positions,  # (n,)
    Slots,  # (n,)
    Table,  # (positions, P) float32: cosines, sines
    Scale,  # (1,) float32 of layout flat, else Table
    Out,  # (n, H, K + P), contiguous, global
    Codes,  # uint8, of row r of page g at g * code_page + r * CODE_ROW
    Scales,  # int32 or uint8, likewise
    Plain,  # bf16 or uint8, likewise
    apart,  # a multiple of 16 where vectors are to be loaded
    code_page,
    scale_page,
    plain_page,
    table_rows,
    cache_rows,
    H: tl.constexpr,
    COLUMNS: tl.constexpr,
    K: tl.constexpr,
    P: tl.constexpr,
    PAGE: tl.constexpr,
    CODE_ROW: tl.constexpr,
    SCALE_ROW: tl.constexpr,
    PLAIN_ROW: tl.constexpr,
    TILES: tl.constexpr,  # power of two of at least those of a latent
    TILE: tl.constexpr,  # columns that share a scale
    FLAT: tl.constexpr,
    POWERS: tl.constexpr,
    V41: tl.constexpr,  # rope columns have scales as the latent
    BITS: tl.constexpr,  # of a code
    SCALE_MIN: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    HEADS: tl.constexpr,
    INTERPRET: tl.constexpr,
):
    """Grid (n, 1 + blocks of heads)."""
    DTYPE: tl.constexpr = Out.dtype.element_ty
    token = tl.cast(tl.program_id(0), tl.int64)
    position = tl.cast(tl.load(Positions + token), tl.int64)
    cosines, sines = load_turns(Table, position, table_rows, P)
    if tl.program_id(1) == 0:
        slot = tl.cast(tl.load(Slots + token), tl.int64)
        page, at = slot // PAGE, slot % PAGE
        one = tl.zeros([1], tl.int64)
        written = (one + slot >= 0) & (one + slot < cache_rows)
        x, y = turned(Rope + token * apart + one, one == 0, cosines, sines, P, INTERLEAVED)
        to = Plain + page * plain_page + at * PLAIN_ROW + one
        if FLAT:
            scale = tl.load(Scale)
            x = e4m3(quotient(rounded(x, DTYPE, INTERPRET), scale + tl.zeros_like(x)))
            y = e4m3(quotient(rounded(y, DTYPE, INTERPRET), scale + tl.zeros_like(y)))
            store_pairs(to, written, x, y, P, INTERLEAVED)
        elif V41:
            x, y = rounded(x, DTYPE, INTERPRET), rounded(y, DTYPE, INTERPRET)
            both = tl.join(x, y) if INTERLEAVED else tl.permute(tl.join(x, y), (0, 2, 1))
            codes, bits = coded(tl.reshape(both, (P // TILE, TILE)), BITS, SCALE_MIN)
            tile = tl.arange(0, P // TILE)
            byte = tile[:, None] * (TILE * BITS // 8) + tl.arange(0, TILE * BITS // 8)[None, :]
            inside = (tile < P) & written
            tl.store(Plain + page * plain_page + at * PLAIN_ROW + byte, codes, mask=inside[:, None])
            tl.store(Scales + page * scale_page + at * SCALE_ROW + K // TILE + tile, bits, mask=inside)
        else:
            put(to, written, x, y, DTYPE, P, INTERLEAVED, INTERPRET)
        tile = tl.arange(0, TILES)
        column = tile[:, None] * TILE + tl.arange(0, TILE)[None, :]
        inside = (column < K) & written[:, None]
        latent = tl.load(Latent + token * K + column, mask=inside, other=0.0).to(tl.float32)
        if V41:
            codes, bits = coded(latent, BITS, SCALE_MIN)
            there = (tile * TILE < K) & written
            tl.store(Scales + page * scale_page + at * SCALE_ROW + tile, bits, mask=there)
            byte = tile[:, None] * (TILE * BITS // 8) + tl.arange(0, TILE * BITS // 8)[None, :]
            tl.store(Codes + page * code_page + at * CODE_ROW + byte, codes, mask=there[:, None])
        else:
            if FLAT:
                scales = tl.zeros([TILES], tl.float32) + scale
            else:
                scales = scales_of(latent, POWERS, SCALE_MIN)
                bits = scales.to(tl.int32, bitcast=True)
                bits = bits if Scales.dtype.element_ty == tl.int32 else (bits >> 23).to(tl.uint8)
                there = (tile * TILE < K) & written
                tl.store(Scales + page * scale_page + at * SCALE_ROW + tile, bits, mask=there)
            codes = e4m3(quotient(latent, tl.broadcast_to(scales[:, None], (TILES, TILE))))
            tl.store(Codes + page * code_page + at * CODE_ROW + column, codes, mask=inside)
    else:
        head = (tl.program_id(1) - 1) * HEADS + tl.arange(0, HEADS)
        row = token * H + head
        valid = head < H
        first, second = turned(Q + row * COLUMNS + (COLUMNS - P), valid, cosines, sines, P, INTERLEAVED)
        put(Out + row * (K + P) + K, valid, first, second, DTYPE, P, INTERLEAVED, INTERPRET)


@triton.jit
def rounded(x, DTYPE: tl.constexpr, INTERPRET: tl.constexpr):
    """float32 of what is left of float32 in bf16."""
    bits = round_to(x, DTYPE, INTERPRET).to(tl.uint16, bitcast=True)
    return (bits.to(tl.uint32) << 16).to(tl.float32, bitcast=True)


class PackedAppendPlan(KernelPlan):
    """Inputs and outputs of `workload.packed_append`."""

    workload = append.WORKLOAD
    tiling_type = PackedAppendTiling
    requires = Requirement(archs=("sm_80+",), dtypes=("bf16",), options=("v41", "no_rope"))

    def default_tiling(self) -> PackedAppendTiling:
        if self.problem.no_rope:
            return PackedAppendTiling(1, 2)
        heads = min(16, 1 << (self.problem.h - 1).bit_length())
        return PackedAppendTiling(heads, 4 if heads >= 16 else 2)

    def autotune_configs(self) -> list[Tiling]:
        some = (1,) if self.problem.no_rope else (8, 16, 32, 64)
        return [PackedAppendTiling(heads, warps) for heads in some for warps in (1, 2, 4)]

    def plan(self, *inputs: torch.Tensor) -> TritonKernel:
        self.workload.rebound(self.problem, *inputs)  # refuses strides that the kernel does not read
        return self._make(inputs, append.new_outputs(self.problem, inputs[0]))

    def plan_empty(self) -> TritonKernel:
        return self._make((), ())

    def _make(self, inputs: Any, outputs: Any) -> TritonKernel:
        if self.problem.no_rope:
            return self._make_latents(inputs, outputs)
        pd = self.problem
        flat, tokens = pd.layout == "flat", len(inputs[0]) if inputs else pd.tokens
        like = append.new_outputs(pd.replace(tokens=1, h=1), torch.empty(1, 1, 1, dtype=pd.torch_dtype))
        # Of the bytes of a page, whatever its stride.
        rows = [x.stride(1) for x in like[1:]]
        tile = pd.cache.tile or pd.k
        kinds = {torch.int32: "i32", torch.bfloat16: "bf16", torch.uint8: "u8"}
        index = f"*i{pd.index[3:]}"
        signature = {
            "Q": "*bf16", "Latent": "*bf16", "Rope": "*bf16", "Positions": index, "Slots": index, "Table": "*fp32",
            "Scale": "*fp32", "Out": "*bf16",
            **{name: f"*{kinds[x.dtype]}" for name, x in zip(("Codes", "Scales", "Plain"), like[1:], strict=True)},
            "apart": "i32" if (pd.p + pd.rest) % 16 else "i32:16",
            "code_page": "i64", "scale_page": "i64", "plain_page": "i64", "table_rows": "i32", "cache_rows": "i32",
        }  # fmt: skip

        def arguments(_: Any) -> tuple[Any, ...]:
            apart = [x.stride(0) for x in outputs[1:]]
            sizes = (len(inputs[5]), len(outputs[1]) * pd.page)
            return (*inputs[:6], inputs[6] if flat else inputs[5], *outputs, inputs[2].stride(0), *apart, *sizes)

        return TritonKernel(
            packed_append,
            grid_fn=lambda t: (tokens, 1 + -(-pd.h // t.heads)),
            args_fn=arguments,
            input_tensors=inputs,
            output_tensors=outputs,
            tiling=self.tiling,
            meta_fn=lambda t: {
                "H": pd.h, "COLUMNS": pd.columns, "K": pd.k, "P": pd.p, "PAGE": pd.page, "CODE_ROW": rows[0],
                "SCALE_ROW": rows[1], "PLAIN_ROW": rows[2], "TILES": 1 << (-(-pd.k // tile) - 1).bit_length(),
                "TILE": tile, "FLAT": flat, "POWERS": pd.powers, "V41": pd.v41, "BITS": pd.cache.bits,
                "SCALE_MIN": SCALE_MIN, "INTERLEAVED": pd.interleaved, "HEADS": t.heads,
                "INTERPRET": interpreted(packed_append),
            },
            options_fn=lambda t: {"num_warps": t.num_warps},
            signature_fn=lambda _: signature,
            plan=self,
        )  # fmt: skip

    def _make_latents(self, inputs: Any, outputs: Any) -> TritonKernel:
        pd, tokens = self.problem, len(inputs[0]) if inputs else self.problem.tokens
        flat, row, tile = pd.cache.one_scale, pd.cache.token_bytes, pd.cache.tile or pd.k
        signature = {
            "Latent": "*bf16", "Slots": f"*i{pd.index[3:]}", "Scale": "*fp32" if flat else "*i32", "Codes": "*u8",
            "Scales": "*u8" if flat else "*i32", "apart": "i32" if (pd.k + pd.rest) % 16 else "i32:16",
            "code_page": "i64", "scale_page": "i64", "cache_rows": "i32",
        }  # fmt: skip

        def arguments(_: Any) -> tuple[Any, ...]:
            latent, slots, *scale = inputs
            _, codes, scales, _ = outputs
            sizes = (latent.stride(0), codes.stride(0), scales.stride(0), len(codes) * pd.page)
            return latent, slots, scale[0] if flat else scales, codes, scales, *sizes

        return TritonKernel(
            latent_append,
            grid_fn=lambda _: (tokens,),
            args_fn=arguments,
            input_tensors=inputs,
            output_tensors=outputs,
            tiling=self.tiling,
            meta_fn=lambda _: {
                "PAGE": pd.page, "CODE_ROW": row, "SCALE_ROW": row if flat else row // 4, "TILES": pd.k // tile,
                "TILE": tile, "FLAT": flat, "POWERS": pd.powers, "SCALE_MIN": SCALE_MIN,
            },
            options_fn=lambda t: {"num_warps": t.num_warps},
            signature_fn=lambda _: signature,
            plan=self,
        )  # fmt: skip
