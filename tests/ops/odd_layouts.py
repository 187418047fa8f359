"""Every public function with every tensor of its arguments laid out as kernels do not read it.

python odd_layouts.py LANGUAGE     prints what is wrong on a CPU; TRITON_INTERPRET=1 for triton
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch

from mla_var3.errors import Unsupported, UserError
from mla_var3.ops import (
    absorb_gemm,
    latent_append,
    mla_decode,
    packed_mla_decode,
    rmsnorm,
    rope_append,
    sparse_mla_decode,
)
from mla_var3.ops.context_parallel import merge_partials
from mla_var3.packed_cache import LAYOUTS, NO_ROPE, new_cache, pack, unpack
from mla_var3.workload.rope import rope_table

Made = dict[str, Any]
#: What marks elements of nobody: exact in every dtype.
MARK = 7


def draw(*shape: int, seed: int = 0) -> Any:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape))).bfloat16()


def norm_of(**more: Any) -> Made:
    return {"x": draw(3, 96 if "second_weight" in more else 64), "weight": draw(64), **more}


def gemm_of(side: str, n: int = 3) -> Made:
    return {"x": draw(n, 2, 64), "weight": draw(2 * 2 * 64, 64), "side": side, "out": draw(n, 2, 64)}


def rope_of(layout: str | None = None, n: int = 3) -> Made:
    k = 64 if layout is None else LAYOUTS[layout].columns - 64
    cache = draw(3, 4, k + 64) if layout is None else pack_of(layout, 3, 4)
    made = {
        "q": draw(n, 2, 96), "latent": draw(n, k), "rope": draw(n, 64), "positions": torch.tensor([3, 0, 9][:n]),
        "slots": torch.tensor([6, 1, -1][:n]), "table": rope_table(16), "out": draw(n, 2, k + 64), "kv_cache": cache,
    }  # fmt: skip
    return made | ({} if layout is None else {"layout": layout}) | scale_of(layout)


def latent_of(layout: str, n: int = 3) -> Made:
    made = {"latent": draw(n, 512), "slots": torch.tensor([6, 1, -1][:n]), "kv_cache": pack_of(layout, 3, 4)}
    return {**made, "layout": layout, **scale_of(layout)}


def pack_of(layout: str, pages: int, page: int) -> Any:
    values = draw(pages, page, LAYOUTS[layout].columns)
    return pack(LAYOUTS[layout], values, scale=torch.full((1,), 0.01) if layout.startswith("flat") else None)


def scale_of(layout: str | None) -> Made:
    return {"cache_scale": torch.full((1,), 0.01)} if layout and layout.startswith("flat") else {}


def decode_of() -> Made:
    made = {
        "q": draw(2, 1, 2, 576),
        "kv_cache": draw(4, 16, 1, 576),
        "page_table": torch.tensor([[2, 0], [3, 1]]).int(),
    }
    lens = {"seq_lens": torch.tensor([20, 7]).int(), "out": draw(2, 1, 2, 512)}
    return made | lens | {"lse": torch.zeros(2, 2, 1)}


def packed_of(layout: str) -> Made:
    made = {"q": draw(2, 1, 2, LAYOUTS[layout].columns), "kv_cache": pack_of(layout, 4, 16), "layout": layout}
    tables = {"page_table": torch.tensor([[2, 0], [3, 1]]).int(), "seq_lens": torch.tensor([20, 7]).int()}
    rest = {"sink": torch.randn(2), "out": draw(2, 1, 2, 512), "lse": torch.zeros(2, 2, 1)}
    return made | tables | rest | scale_of(layout)


def sparse_of(layout: str) -> Made:
    made = packed_of(layout)
    del made["page_table"], made["seq_lens"]
    indices = torch.randint(-1, 64, (2, 1, 32), generator=torch.Generator().manual_seed(1)).int()
    return made | {"indices": indices, "topk_lens": torch.tensor([32, 20]).int()}


#: Name: function, what makes its arguments, what it writes into, its design.
CALLS: dict[str, tuple[Callable[..., Any], Made, tuple[str, ...], str]] = {
    "rmsnorm": (rmsnorm, norm_of(), (), "rmsnorm"),
    "rmsnorm_residual": (rmsnorm, norm_of(residual=draw(3, 64, seed=1)), (), "rmsnorm"),
    "rmsnorm_two": (rmsnorm, norm_of(second_weight=draw(32)), (), "rmsnorm"),
    "gemm_q": (absorb_gemm, gemm_of("q"), ("out",), "absorb_gemm"),
    "gemm_out": (absorb_gemm, gemm_of("out"), ("out",), "absorb_gemm"),
    "gemm_one": (absorb_gemm, gemm_of("q", 1), ("out",), "absorb_gemm"),
    "rope": (rope_append, rope_of(), ("out", "kv_cache"), "rope_append"),
    "rope_one": (rope_append, rope_of(n=1), ("out", "kv_cache"), "rope_append"),
    **{f"rope_{x}": (rope_append, rope_of(x), ("out", "kv_cache"), "packed_append") for x in ("v32", "v4", "flat")},
    **{f"latent_{x}": (latent_append, latent_of(x), ("kv_cache",), "packed_append") for x in NO_ROPE},
    "latent_one": (latent_append, latent_of("v32_no_rope", 1), ("kv_cache",), "packed_append"),
    "merge": (merge_partials, {"partials": draw(3, 5, 64), "lse": torch.randn(3, 5)}, (), "merge_partials"),
    "decode": (mla_decode, decode_of(), ("out", "lse"), "flash_mla"),
    **{f"packed_{x}": (packed_mla_decode, packed_of(x), ("out", "lse"), "sparse_mla") for x in ("v32", "v4", "flat")},
    **{f"sparse_{x}": (sparse_mla_decode, sparse_of(x), ("out", "lse"), "sparse_mla") for x in ("v32", "flat")},
}  # fmt: skip


def layouts(x: Any) -> Iterator[tuple[str, Any, Any]]:
    """A name, a tensor of these values that lies otherwise, and the memory that it is a part of."""
    columns = x.shape[-1]
    room = x.new_full((*x.shape[:-1], 2 * columns), MARK)
    yield "every other column", room[..., ::2].copy_(x), room
    room = x.new_full((*x.shape[:-1], columns + 1), MARK)
    yield "rows an element further apart", room[..., :columns].copy_(x), room
    room = x.new_full((x.numel() + 1,), MARK)
    yield "an element behind a multiple of 16 bytes", room[1:].view(x.shape).copy_(x), room
    if x.dim() > 1:
        room = x.new_full((2 * x.shape[0], *x.shape[1:]), MARK)
        yield "every other row", room[::2].copy_(x), room
        room = x.new_full((*x.shape[1:-1], x.shape[0], columns), MARK)
        moved = room.movedim(-2, 0)
        yield "the first dimension behind the others", moved.copy_(x), room
    if 1 in x.shape:
        room = x.clone()
        strides = [3 if size == 1 else apart for size, apart in zip(room.shape, room.stride(), strict=True)]
        yield "strides of dimensions of size 1", room.as_strided(room.shape, strides), room


def results(call: str, given: Made, kernel: str | None, on: Any) -> list[Any]:
    """What a call returns or writes; what a cache says, where it is written."""
    function, _, written, _ = CALLS[call]
    found = function(**given, kernel=kernel, on=on)
    if not written:
        return list(found) if isinstance(found, tuple) else [found]
    layout = given.get("layout")
    return [
        unpack(LAYOUTS[layout], given[name], given.get("cache_scale")) if name == "kv_cache" and layout else given[name]
        for name in written
    ]


def off(what: str, found: list[Any], wanted: list[Any]) -> Iterator[str]:
    """Which of the results are not those."""
    for i, (x, y) in enumerate(zip(found, wanted, strict=True)):
        if not torch.allclose(x.double(), y.double(), rtol=2e-2, atol=2e-2, equal_nan=True):
            yield f"{what}: result {i} is off by {float((x.double() - y.double()).abs().max())}"


def wrong(call: str, kernel: str | None, on: Any, device: str = "cpu") -> Iterator[str]:
    """What a call gets wrong: of each tensor laid out in each way it computes the same, or refuses it by its name."""
    _, made, written, design = CALLS[call]
    tensors = {name for name, x in made.items() if isinstance(x, torch.Tensor)}

    def fresh() -> Made:
        given = {name: x.to(device).clone() if name in tensors else x for name, x in made.items()}
        if given.get("layout") == "v4":  # its pages are padded
            given["kv_cache"] = new_cache(LAYOUTS["v4"], *made["kv_cache"].shape[:2], device).copy_(made["kv_cache"])
        return given

    wanted = results(call, fresh(), f"torch/{design}", on)
    yield from off(f"{call}, as it is", results(call, fresh(), kernel, on), wanted)
    for name in sorted(tensors):
        for how, other, room in layouts(made[name].to(device)):
            given = fresh() | {name: other}
            try:
                found = results(call, given, kernel, on)
            except Unsupported:  # by a version that is named
                continue
            except UserError as error:
                if not re.search(rf"\b{name}\b", str(error)):
                    yield f"{call}, {name}, {how}: {error}"
                continue
            yield from off(f"{call}, {name}, {how}", found, wanted)
            if name in written:
                marks = torch.full_like(room, MARK)
                marks.as_strided(other.shape, other.stride(), other.storage_offset()).copy_(other)
                if not torch.equal(marks, room):
                    yield f"{call}, {name}, {how}: elements of nobody were written"


def kernels(language: str) -> dict[str, str]:
    """The version of a language that takes each call, of those that are there."""
    from mla_var3.catalogue import registry

    here = {k.label for k in registry.all_kernels()}
    return {call: label for call, (*_, design) in CALLS.items() if (label := f"{language}/{design}") in here}


if __name__ == "__main__":
    from ops_fakes import CpuEngine

    for call, kernel in kernels(sys.argv[1]).items():
        try:
            for reason in wrong(call, kernel, CpuEngine()):
                print(reason)
        except Unsupported as refusal:
            print("left out", call, refusal)
        else:
            print("tried", call)
