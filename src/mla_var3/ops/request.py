"""A call's tensors, judged: the problem that they are, or one sentence about what is wrong with them."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from mla_var3.errors import UserError
from mla_var3.workload.decode import MlaProblem

if TYPE_CHECKING:
    import torch

_CACHE_ALIGNMENT = 128  # bytes: what the copy engine that reads pages assumes of their base
_ALIGNMENT = 16  # bytes: vectors of query and output rows; numbers by themselves lie anywhere


def problem_of(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    page_table: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    head_dim_v: int,
    scale: float | None,
    causal: bool,
) -> MlaProblem:
    """The problem of a call, with t the most tokens that its page table can name.

    Looks at shapes, dtypes and devices only, never at what lies on the device. Raises `UserError` naming the argument.
    """
    import torch

    tensors = {"q": q, "kv_cache": kv_cache, "page_table": page_table, "seq_lens": seq_lens}
    for (name, tensor), rank in zip(tensors.items(), (4, 4, 2, 1), strict=True):
        if not isinstance(tensor, torch.Tensor):
            raise UserError(f"{name} is a {type(tensor).__name__}: pass a torch tensor.")
        if tensor.dim() != rank:
            raise UserError(f"{name} has {tensor.dim()} dimensions, shape {tuple(tensor.shape)}: {_SHAPES[name]}.")
    dtypes = {torch.bfloat16: "bf16", torch.float16: "fp16"}
    if q.dtype not in dtypes:
        raise UserError(f"q is {q.dtype}: the kernels compute in torch.bfloat16 and torch.float16.")
    if kv_cache.dtype != q.dtype:
        raise UserError(f"kv_cache is {kv_cache.dtype} and q {q.dtype}: give both the same dtype.")
    for name in ("page_table", "seq_lens"):
        if tensors[name].dtype != torch.int32:
            raise UserError(f"{name} is {tensors[name].dtype}: pass it as torch.int32.")
    for name, tensor in tensors.items():
        if tensor.device != q.device:
            raise UserError(f"{name} is on {tensor.device} and q on {q.device}: put all tensors on one GPU.")
    b, s, h, width = q.shape
    _, page, h_kv, cached = kv_cache.shape
    if cached != width:
        raise UserError(f"kv_cache has {cached} columns and q {width}: both are latent + rope columns wide.")
    if not 0 < head_dim_v <= width:
        raise UserError(f"head_dim_v = {head_dim_v} latent columns of {width}: use 512 for the published models.")
    if page_table.shape[0] != b or seq_lens.shape[0] != b:
        raise UserError(
            f"page_table has {page_table.shape[0]} rows and seq_lens {seq_lens.shape[0]} entries for the {b} requests "
            "of q: give one of each for a request."
        )
    if page_table.shape[1] < 1:
        raise UserError("page_table has no columns: give at least one page for a request.")
    if h_kv < 1 or h % h_kv:
        raise UserError(f"{h} query heads do not share {h_kv} latent caches evenly: h must be a multiple of h_kv.")
    if not kv_cache.is_contiguous():
        raise UserError(
            f"kv_cache is not contiguous (strides {tuple(kv_cache.stride())}): pass a contiguous cache; it is too "
            "large to be copied in a call."
        )
    if kv_cache.is_cuda and kv_cache.data_ptr() % _CACHE_ALIGNMENT:
        raise UserError(f"kv_cache starts at an address that is not a multiple of {_CACHE_ALIGNMENT} bytes: align it.")
    sizes = (max(b, 1), s, page_table.shape[1] * page, h, h_kv, head_dim_v, width - head_dim_v)
    return _problem(*sizes, bool(causal) and s > 1, page, dtypes[q.dtype], None if scale is None else float(scale))


@functools.lru_cache(maxsize=4096)
def _problem(
    b: int,
    s: int,
    t: int,
    h: int,
    h_kv: int,
    k: int,
    p: int,
    causal: bool,
    page: int,
    dtype: str,
    scale: float | None,
) -> MlaProblem:
    """One object for equal problems: making and judging one takes longer than all else that a call does on the host."""
    return MlaProblem(
        b=b, s=s, t=t, h=h, h_kv=h_kv, k=k, p=p, causal=causal, page=page, dtype=dtype, softmax_scale=scale
    )  # fmt: skip


_SHAPES = {
    "q": "pass (b, s, h, k + p)",
    "kv_cache": "pass (pages, tokens of a page, h_kv, k + p)",
    "page_table": "pass (b, pages of the longest request)",
    "seq_lens": "pass (b,)",
}


def on_gpu(q: torch.Tensor) -> None:
    """Raises `UserError` for a tensor that is not on a CUDA device."""
    if q.device.type != "cuda":
        raise UserError(f"q is on {q.device}: mla_decode runs on an NVIDIA GPU, so put the tensors on one.")


def compact(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor itself where a kernel can read it, else a copy of it (small tensors only: a copy is a launch)."""
    if tensor.is_contiguous() and tensor.data_ptr() % _needed(tensor) == 0:
        return tensor
    import torch

    return tensor.clone(memory_format=torch.contiguous_format)


def _needed(tensor: torch.Tensor) -> int:
    """Bytes that a tensor's address must be a multiple of: rows of 16-bit values are read as vectors."""
    return _ALIGNMENT if tensor.element_size() == 2 else tensor.element_size()


def result(name: str, given: torch.Tensor | None, shape: tuple[int, ...], dtype: Any, device: Any) -> torch.Tensor:
    """A tensor for a result: the caller's, when it fits, or a new one."""
    import torch

    if given is None:
        return torch.empty(shape, dtype=dtype, device=device)
    if tuple(given.shape) != shape or given.dtype != dtype or given.device != device:
        raise UserError(
            f"{name} is {tuple(given.shape)} {given.dtype} on {given.device}: pass {shape} {dtype} on {device}."
        )
    if not given.is_contiguous() or given.data_ptr() % _needed(given):
        raise UserError(f"{name} must be contiguous and start at a multiple of {_needed(given)} bytes.")
    return given
