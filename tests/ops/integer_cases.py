"""Calls with int64 values that int32 does not hold, each beside the int32 call that it means."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from public_calls import NAMES, arguments

from mla_var3.catalogue import registry
from mla_var3.packed_cache import NO_ROPE
from mla_var3.workload import packed_append, rope, sparse_decode
from mla_var3.workload.decode import MlaProblem, fifth_input, make_inputs, mla_decode_reference
from mla_var3.workload.packed_append import PackedAppendProblem
from mla_var3.workload.rope import RopeProblem
from mla_var3.workload.sparse_decode import SparseProblem, input_names

#: Their lower halves are 0, 1, 7 and -1, and 0, 7 and -1: numbers of tokens and pages, and lengths.
ABOVE = (1 << 32, (1 << 32) + 1, (1 << 32) + 7, (1 << 63) - 1)
BELOW = (-(1 << 63), 7 - (1 << 32), -1)
VALUES = (*ABOVE, *BELOW)
#: For interpreters, which take seconds: one of each kind that names a token once its upper half is cut off.
FEW = (ABOVE[2], BELOW[1])

Case = tuple[str, dict[str, Any], dict[str, Any]]

#: All tokens of every request's pages are there, so that a length of all of them reads nothing of nobody's.
DENSE = MlaProblem(b=3, h=16, t=128)
SPARSE = {
    "v32": SparseProblem(b=3, s=2, h=16, t=96, topk=40, page=16, lengths=True, softmax_scale=0.3),
    "v4": SparseProblem(
        b=3, s=2, h=16, t=96, topk=40, page=16, layout="v4", lengths=True, extra=24, extra_t=64, extra_page=2,
        extra_lengths=True, softmax_scale=0.3,
    ),
    "flat": SparseProblem(b=3, s=1, h=16, t=96, topk=40, page=16, layout="flat", lengths=True, softmax_scale=0.3),
    "bf16": SparseProblem(b=3, s=2, h=16, t=96, topk=40, page=16, layout="bf16", lengths=True, softmax_scale=0.3),
}  # fmt: skip
PACKED = {
    name: SparseProblem(b=3, h=16, t=128, page=64, layout=name, paged=True, softmax_scale=0.3)
    for name in ("v32", "v4", "flat")
}
FLASH_MLA = {
    "kv_cache": "k_cache", "page_table": "block_table", "seq_lens": "cache_seqlens", "topk_lens": "topk_length",
    "extra_cache": "extra_k_cache", "extra_indices": "extra_indices_in_kvcache", "extra_topk_lens": "extra_topk_length",
    "scale": "softmax_scale",
}  # fmt: skip


def _with(given: dict[str, Any], name: str, at: Any, value: int, meant: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """The arguments with a value of int64 at a place of one, and with what it means there as int32."""
    wide, narrow = given[name].long(), given[name].clone()
    wide[at], narrow[at] = value, meant
    return {**given, name: wide}, {**given, name: narrow}


def _rows(given: dict[str, Any], most: int, values: tuple[int, ...]) -> Iterator[Case]:
    """Values of page_table and seq_lens; most: tokens of a row."""
    for value in values:
        yield f"seq_lens {value}", *_with(given, "seq_lens", 1, value, most if value > 0 else 0)
        one_page = {**given, "seq_lens": given["seq_lens"] // 2}
        # Behind a request's last page an entry may be anything.
        yield f"page_table {value}", *_with(one_page, "page_table", (1, -1), value, 0)


def decode_cases(device: str, values: tuple[int, ...] = VALUES) -> Iterator[Case]:
    """Calls of `mla_decode`."""
    names = ("q", "kv_cache", "page_table", "seq_lens")
    given = dict(zip(names, make_inputs(DENSE, device, seed=0, dist="normal"), strict=True))
    yield from _rows(given, DENSE.t, values)


def packed_query_cases(device: str) -> Iterator[Case]:
    """Calls of `mla_decode` with cu_seqlens_q."""
    names = ("q", "kv_cache", "page_table", "seq_lens")
    given = dict(zip(names, make_inputs(DENSE, device, seed=0, dist="normal"), strict=True))
    offsets = torch.tensor([0, 1, 1, 3], dtype=torch.int32, device=device)
    given |= {"q": given["q"][:, 0], "cu_seqlens_q": offsets}
    for value in VALUES:
        at, meant = (-1, 3) if value > 0 else (0, 0)
        yield f"cu_seqlens_q {value}", *_with(given, "cu_seqlens_q", at, value, meant)


def _arguments(problem: SparseProblem, device: str) -> dict[str, Any]:
    inputs = sparse_decode.make_inputs(problem, device, seed=1)
    return {**arguments(problem, inputs), "scale": problem.softmax_scale}


def sparse_cases(problem: SparseProblem, device: str, values: tuple[int, ...] = VALUES) -> Iterator[Case]:
    """Calls of `sparse_mla_decode`."""
    given = _arguments(problem, device)
    for name in ("indices", "extra_indices", "topk_lens", "extra_topk_lens"):
        if name not in given:
            continue
        for value in values:
            if "indices" in name:
                yield f"{name} {value}", *_with(given, name, (0, 0, 0), value, -1)
            else:
                # Behind a request's length indices name what nobody may read: here all of them name its first token.
                indices = name.replace("topk_lens", "indices")
                chosen = given[indices].clone()
                chosen[1] = chosen[1, :, :1]
                meant = chosen.shape[-1] if value > 0 else 0
                yield f"{name} {value}", *_with({**given, indices: chosen}, name, 1, value, meant)


def packed_cases(problem: SparseProblem, device: str, values: tuple[int, ...] = VALUES) -> Iterator[Case]:
    """Calls of `packed_mla_decode`."""
    yield from _rows(_arguments(problem, device), problem.t, values)


def slots_are_kept(layout: str | None, language: str, value: int, device: str, hardware: Any = None) -> None:
    """Sees that a token with such a slot is not written, and the others are. layout: of a packed cache."""
    workload, problem = (
        (rope, RopeProblem(tokens=4, h=2)) if layout is None
        else (packed_append, PackedAppendProblem(tokens=4, layout=layout) if layout in NO_ROPE
              else PackedAppendProblem(tokens=4, h=2, layout=layout))
    )  # fmt: skip
    design = "rope_append" if layout is None else "packed_append"
    plan = registry.get_plan(registry.KernelId.parse(f"{language}/{design}"))(problem, None, hardware)
    given = list(workload.make_inputs(problem, device, seed=0))
    given[1 if layout in NO_ROPE else 4] = torch.tensor([0, value, 7, 1], device=device)
    kernel = plan.plan(*given)
    cache = kernel.output_tensors[1]  # or the codes
    cache.fill_(5)
    kernel.launch()
    assert (cache != 5).any(-1).flatten().nonzero().flatten().tolist() == [0, 1, 7], (layout, value)


def reference_of(given: dict[str, Any], problem: SparseProblem | None) -> tuple[Any, Any]:
    """(out, lse) of an int32 call in higher precision. problem: of packed caches."""
    if problem is not None:
        names = {argument: name for name, argument in NAMES.items()}
        inputs = {names.get(name, name): x for name, x in given.items()}
        inputs["scale"] = given.get("cache_scale")
        found = sparse_decode.reference(problem, *(inputs[name] for name in input_names(problem)))
    else:
        inputs = tuple(given.values())
        found = mla_decode_reference(*inputs[:4], k=512, scale=192**-0.5, causal=False, **fifth_input(*inputs))
    return found[0], found[1]


def hold(cases: Iterator[Case], call: Callable[..., Any], problem: SparseProblem | None = None) -> int:
    """Sees that calls of int64 give the bits of those that they mean, and these what the oracle gives."""
    count = 0
    for name, wide, narrow in cases:
        count += 1
        found, meant = call(**wide), call(**narrow)
        for got, want, true in zip(found, meant, reference_of(narrow, problem), strict=True):
            assert torch.equal(got, want), name
            torch.testing.assert_close(got.double(), true.double(), atol=0.02, rtol=0.02, msg=name)
    return count
