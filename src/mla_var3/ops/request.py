"""A call's tensors, judged: the problem that they are, or one sentence about what is wrong with them."""

from __future__ import annotations

import functools
import math
import numbers
from typing import TYPE_CHECKING, Any

from mla_var3.errors import UserError
from mla_var3.packed_cache import bytes_of, fields, layout_of
from mla_var3.runtime import limits
from mla_var3.workload import MOST_LISTED, TORCH_DTYPES
from mla_var3.workload.decode import MlaProblem

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

#: Why a cache of 8-bit values is refused, and what to do.
NO_FP8 = "mla_decode takes torch.bfloat16 and torch.float16, so call packed_mla_decode for packed FP8 caches"

_CACHE_ALIGNMENT = 128  # bytes: what the copy engine that reads pages assumes of their base
_PAGE_ALIGNMENT = 16  # bytes: what it assumes of the step between pages
#: What an int32 holds.
LEAST, MOST = -(1 << 31), (1 << 31) - 1
_ROW_ALIGNMENT = 16  # bytes: what kernels that read rows as vectors assume of where these begin
VECTOR = _ROW_ALIGNMENT // 2  # elements of 16 bits in a vector
#: Bytes that an address must be a multiple of, by the bytes of an element: rows of 16-bit values are read as vectors.
_NEEDED = {2: 16, 4: 4}
_WORDS = {f"torch.{name}": word for word, name in TORCH_DTYPES.items()}


def problem_of(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    page_table: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    head_dim_v: int,
    scale: float | None,
    causal: bool,
    cu_seqlens_q: torch.Tensor | None = None,
    mask: torch.Tensor | None = None,
) -> MlaProblem:
    """The problem of a call, with t the most tokens that its page table can name, and packed query tokens spread
    evenly.

    Looks at shapes, dtypes and devices only, never at what lies on the device. Raises `UserError` naming the argument.
    """
    import torch

    tensors = {"q": q, "kv_cache": kv_cache, "page_table": page_table, "seq_lens": seq_lens}
    optional = {"cu_seqlens_q": cu_seqlens_q, "mask": mask}
    tensors |= {name: tensor for name, tensor in optional.items() if tensor is not None}
    packed = cu_seqlens_q is not None
    for name, tensor in tensors.items():
        if not isinstance(tensor, torch.Tensor):
            raise UserError(f"{name} is a {type(tensor).__name__}: pass a torch tensor.")
        kind = "packed q" if packed and name == "q" else name
        if tensor.dim() not in _RANKS[kind]:
            raise UserError(f"{name} has {tensor.dim()} dimensions, shape {tuple(tensor.shape)}: {_SHAPES[kind]}.")
    dtype_of_q = dtype_name(q.dtype, "q")
    if kv_cache.dtype != q.dtype:
        if kv_cache.element_size() == 1:
            raise UserError(f"kv_cache is {kv_cache.dtype}: {NO_FP8}.")
        raise UserError(f"kv_cache is {kv_cache.dtype} and q {q.dtype}: give both the same dtype.")
    for name in ("page_table", "seq_lens", *(["cu_seqlens_q"] if packed else [])):
        dtype = tensors[name].dtype
        if dtype != torch.int32 and dtype != torch.int64:
            raise UserError(f"{name} is {dtype}: pass it as torch.int32.")
    for name, tensor in tensors.items():
        if tensor.device != q.device:
            raise UserError(f"{name} is on {tensor.device} and q on {q.device}: put all tensors on one GPU.")
    b, s, h, width = (len(seq_lens), 1, *q.shape[1:]) if packed else q.shape
    _, page, h_kv, cached = kv_cache.shape if kv_cache.dim() == 4 else (*kv_cache.shape[:2], 1, kv_cache.shape[2])
    if cached != width:
        raise UserError(f"kv_cache has {cached} columns and q {width}: both are latent + rope columns wide.")
    if not isinstance(head_dim_v, int):
        raise UserError(f"head_dim_v is a {type(head_dim_v).__name__}: pass the latent columns as an int.")
    if not 0 < head_dim_v <= width:
        raise UserError(f"head_dim_v = {head_dim_v} latent columns of {width}: use 512 for the published models.")
    if page_table.shape[0] != b or seq_lens.shape[0] != b:
        raise UserError(
            f"page_table has {page_table.shape[0]} rows and seq_lens {seq_lens.shape[0]} entries for the {b} requests "
            "of q: give one of each for a request."
        )
    if cu_seqlens_q is not None and len(cu_seqlens_q) != b + 1:
        raise UserError(
            f"cu_seqlens_q has {len(cu_seqlens_q)} entries for {b} requests: give where each one's query tokens begin, "
            "and how many there are in all."
        )
    if mask is not None:
        _tree(mask, b, s, causal, packed)
    if page_table.shape[1] < 1:
        raise UserError("page_table has no columns: give at least one page for a request.")
    if h_kv < 1 or h % h_kv:
        raise UserError(f"{h} query heads do not share {h_kv} latent caches evenly: h must be a multiple of h_kv.")
    strided = not kv_cache.is_contiguous()
    if strided:
        _pages_apart(kv_cache)
    if kv_cache.is_cuda and kv_cache.data_ptr() % _CACHE_ALIGNMENT:
        raise UserError(f"kv_cache starts at an address that is not a multiple of {_CACHE_ALIGNMENT} bytes: align it.")
    number_of("requests", "seq_lens" if packed else "q", b)
    number_of("query tokens of a request", "q", s)
    tokens = page_table.shape[1] * page
    if tokens > limits.MOST_TOKENS:
        raise UserError(f"{limits.too_long(tokens)}.")
    sizes = (max(b, 1), s, tokens, h, h_kv, head_dim_v, width - head_dim_v)
    masked, factor = bool(causal) and (packed or s > 1), None if scale is None else number("scale", scale)
    total = len(q) if packed else None
    return _problem(*sizes, masked, page, dtype_of_q, factor, strided, total, mask is not None)


def number_of(what: str, name: str, count: int) -> None:
    """Raises `UserError` where an argument has more requests or query tokens than a call takes."""
    if count > MOST_LISTED:
        raise UserError(f"{name} has {count:,} {what}: a call takes {MOST_LISTED:,}, so make several.")


def named_as(**arguments: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """A decorator of a function that makes the problem of a call: what is wrong with a field of it is told of the
    argument that the field comes from. arguments: how each field is called, the argument first."""

    def decorate(make: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(make)
        def made(*fields: Any) -> Any:
            try:
                return make(*fields)
            except UserError as error:
                field, _, said = str(error).removeprefix("problem.").partition(" ")
                if not str(error).startswith("problem.") or field not in arguments:
                    raise
                raise UserError(f"{arguments[field]} {said}") from None

        made.__dict__["arguments"] = arguments
        return made

    return decorate


def number(name: str, value: Any) -> float:
    """An argument that is a number, as a float. A tensor is none: its value would be waited for."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real) or not math.isfinite(value):
        what = value if isinstance(value, float) else f"of type {type(value).__name__}"
        raise UserError(f"{name} is {what}: pass a finite number, or None for its default.")
    return float(value)


def _tree(mask: torch.Tensor, b: int, s: int, causal: bool, packed: bool) -> None:
    """Raises `UserError` for a mask of the newest tokens that does not fit."""
    import torch

    if packed or causal:
        other = "cu_seqlens_q" if packed else "causal"
        raise UserError(f"mask says what each of s query tokens sees of the newest s: leave it or {other} out.")
    if mask.dtype != torch.bool or tuple(mask.shape) != (b, s, s):
        raise UserError(f"mask is {mask.dtype} {tuple(mask.shape)}: pass torch.bool, ({b}, {s}, {s}).")


@functools.lru_cache(maxsize=4096)
@named_as(
    b="seq_lens (b,): b", s="q (b, s, h, k + p): s", h="q (b, s, h, k + p): h", k="head_dim_v",
    p="q (b, s, h, k + p): p", h_kv="kv_cache (pages, page, h_kv, k + p): h_kv",
    page="kv_cache (pages, page, h_kv, k + p): page", t="page_table and kv_cache: width · page",
    softmax_scale="scale", **{"queries.total": "q (tokens, h, k + p): tokens"},
)  # fmt: skip
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
    strided: bool,
    total: int | None,
    tree: bool,
) -> MlaProblem:
    """One object for equal problems: making and judging one takes longer than all else that a call does on the host.
    Raises `UserError` for sizes that no version takes."""
    problem = MlaProblem(
        b=b, s=s, t=t, h=h, h_kv=h_kv, k=k, p=p, causal=causal, page=page, dtype=dtype, softmax_scale=scale,
        strided_pages=strided, queries=None if total is None else {"total": total}, tree=tree,
    )  # fmt: skip
    if not (counted := limits.decode_sizes(problem)):
        raise UserError(f"{counted.reason}.")
    return problem


_RANKS = {
    "q": (4,), "packed q": (3,), "kv_cache": (3, 4), "page_table": (2,), "seq_lens": (1,), "cu_seqlens_q": (1,),
    "mask": (3,),
}  # fmt: skip
_SHAPES = {
    "q": "pass (b, s, h, k + p), or with cu_seqlens_q (tokens, h, k + p)",
    "packed q": "with cu_seqlens_q pass (tokens, h, k + p)",
    "cu_seqlens_q": "pass (b + 1,)",
    "mask": "pass (b, s, s)",
    "kv_cache": "pass (pages, tokens of a page, h_kv, k + p), or without h_kv",
    "page_table": "pass (b, pages of the longest request)",
    "seq_lens": "pass (b,)",
}


def _pages_apart(kv_cache: torch.Tensor) -> None:
    """Raises `UserError` for a cache whose strides are anything but contiguous pages at even distances."""
    step = kv_cache.stride(0)
    too_near = step < kv_cache[0].numel()
    if too_near or step * kv_cache.element_size() % _PAGE_ALIGNMENT or not kv_cache[:1].is_contiguous():
        raise UserError(
            f"kv_cache is not contiguous (strides {tuple(kv_cache.stride())}) and too large to be copied in a call: "
            f"only its pages may lie further apart than they are long, by a multiple of {_PAGE_ALIGNMENT} bytes."
        )


def as_pages(kv_cache: torch.Tensor) -> torch.Tensor:
    """A view of a cache in four dimensions. Where pages lie apart, it has a contiguous page's strides in dimensions of
    size 1 too, of which a tensor may say anything."""
    if kv_cache.dim() == 3:
        kv_cache = kv_cache.unsqueeze(2)
    if kv_cache.is_contiguous():
        return kv_cache
    _, _, h_kv, width = kv_cache.shape
    return kv_cache.as_strided(kv_cache.shape, (kv_cache.stride(0), h_kv * width, width, 1))


def as_bytes(mask: torch.Tensor) -> torch.Tensor:
    """A bool tensor as contiguous uint8: a view, or a copy of one that is not contiguous."""
    import torch

    return mask.detach().contiguous().view(torch.uint8)


def packed_pages(name: str, cache: torch.Tensor, layout: str, like: torch.Tensor) -> torch.Tensor:
    """A cache as kernels take it: (pages, page, bytes of a token) of uint8, or (pages, page, 576) of bf16."""
    import torch

    if not isinstance(cache, torch.Tensor):
        raise UserError(f"{name} is a {type(cache).__name__}: pass a torch tensor.")
    cache = cache.detach()
    if cache.dim() == 4 and cache.shape[2] == 1:
        cache = cache.squeeze(2)
    judge(name, cache, (None, None, None), None, like)
    cache = bytes_of(layout_of(layout), cache, name)
    row = cache.shape[2]
    if cache.shape[1] == 1:  # strides of dimensions of size 1 say nothing
        cache = cache.as_strided(cache.shape, (cache.stride(0), row, cache.stride(2)))
    if len(cache) == 1:
        cache = cache.as_strided(cache.shape, (layout_of(layout).page_bytes(cache.shape[1]), *cache.stride()[1:]))
    if cache.data_ptr() % _PAGE_ALIGNMENT:
        raise UserError(f"{name} starts at an address that is not a multiple of {_PAGE_ALIGNMENT} bytes: align it.")
    try:
        fields(layout_of(layout), cache)
    except UserError as error:
        raise UserError(f"{name}: {error}") from None
    step = cache.stride(0) * cache.element_size()
    if len(cache) > 1 and (step < cache[0].numel() * cache.element_size() or step % _PAGE_ALIGNMENT):
        raise UserError(
            f"{name} has pages of {cache[0].numel() * cache.element_size()} bytes that begin {step} bytes apart: they "
            f"must not overlap, and begin a multiple of {_PAGE_ALIGNMENT} bytes apart."
        )
    return cache


def dtype_name(dtype: torch.dtype, name: str, among: tuple[str, ...] = ("bf16", "fp16"), wanted: str = "") -> str:
    """The problem's word for a dtype; raises `UserError` for one of an argument that is not among those words. wanted:
    what is said then, by default which dtypes the kernels compute in."""
    word = _WORDS.get(str(dtype))
    if word not in among:
        raise UserError(f"{name} is {dtype}: {wanted or 'the kernels compute in torch.bfloat16 and torch.float16'}.")
    return word


def judge(
    name: str, tensor: torch.Tensor, shape: tuple[int | None, ...], dtype: torch.dtype | None, like: torch.Tensor
) -> torch.Tensor:
    """The tensor, without gradients. shape: None for any size; dtype: None for any; like: a tensor of the same device.
    Raises `UserError` for one that is otherwise."""
    import torch

    if not isinstance(tensor, torch.Tensor):
        raise UserError(f"{name} is a {type(tensor).__name__}: pass a torch tensor.")
    given = tensor.shape
    # A list: a generator takes longer to make than this to go through.
    differ = [want for want, size in zip(shape, given, strict=False) if want is not None and want != size]
    fits = len(given) == len(shape) and not differ
    if not fits or (dtype is not None and dtype != tensor.dtype) or tensor.device != like.device:
        sizes = ", ".join("any" if size is None else str(size) for size in shape)
        raise UserError(
            f"{name} is {tuple(tensor.shape)} {tensor.dtype} on {tensor.device}: pass ({sizes}) "
            f"{dtype or like.dtype} on {like.device}."
        )
    return tensor.detach()


def judge_places(
    positions: torch.Tensor, slots: torch.Tensor, table: torch.Tensor, n: int, columns: int, like: torch.Tensor
) -> None:
    """Of n new tokens: positions and slots (n,), both int32 or both int64, and the table that turns them (any, columns)
    float32, all on the device of `like`. Raises `UserError`."""
    import torch

    judge("positions", positions, (n,), None, like)
    if positions.dtype not in (torch.int32, torch.int64):
        raise UserError(f"positions are {positions.dtype}: pass torch.int64 or torch.int32.")
    judge("slots", slots, (n,), positions.dtype, like)
    judge("table", table, (None, columns), torch.float32, like)


def compact(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor itself where a kernel can read it, else a copy of it (small tensors only: a copy is a launch). The
    copy is made on the current stream, whose later work may use its memory again; in a capture it lies in the graph's
    own memory, so that replays make it anew."""
    if tensor.is_contiguous() and not tensor.data_ptr() % _NEEDED[tensor.element_size()]:
        return tensor
    import torch

    return tensor.clone(memory_format=torch.contiguous_format)


def bounds_of(problem: MlaProblem) -> dict[str, tuple[int, int]]:
    """The least and the most that `narrowed` leaves of the integers of a call of `mla_decode`, by argument."""
    return {
        "page_table": (LEAST, MOST), "seq_lens": (0, problem.t), "cu_seqlens_q": (0, problem.query_tokens)
    }  # fmt: skip


def narrowed(tensor: torch.Tensor, least: int = LEAST, most: int = MOST, *, strided: bool = False) -> torch.Tensor:
    """An int32 or int64 tensor as a kernel reads it: int32. This is the one place where integers are narrowed.

    Values of int64 outside of least .. most become the nearer of the two, on the device, before they are narrowed: the
    lower half of 2^32 + 7 is 7, which would be another token, page or length. least and most: what lengths may be; for
    indices and pages all that an int32 holds, whose ends lie outside of every cache, as the value did. int32 is passed
    on as it is. int64 costs two small kernels. strided: the last dimension is contiguous, and the others may have any
    strides.
    """
    import torch

    if tensor.dtype == torch.int64:
        tensor = tensor.clamp(least, most).to(torch.int32, memory_format=torch.contiguous_format)
    if strided and not tensor.is_contiguous() and (tensor.shape[-1] == 1 or tensor.stride(-1) == 1):
        return plain_strides(tensor)
    return compact(tensor)


def integers(
    name: str, tensor: torch.Tensor, shape: tuple[int | None, ...], like: torch.Tensor, least: int, most: int,
    *, strided: bool = False,
) -> torch.Tensor:  # fmt: skip
    """An argument of int32 or int64, judged and `narrowed`. The others: as of `judge`. Raises `UserError`."""
    import torch

    is_long = isinstance(tensor, torch.Tensor) and tensor.dtype == torch.int64
    return narrowed(
        judge(name, tensor, shape, torch.int64 if is_long else torch.int32, like), least, most, strided=strided
    )


def rows_of(tensor: torch.Tensor, step: int = 1) -> torch.Tensor:
    """A tensor (..., columns) as kernels read it, without gradients, or a copy that is so, which is a launch: the first
    column at a multiple of 16 bytes, columns beside each other, and where it is not contiguous, rows that lie multiples
    of `step` elements apart and do not overlap."""
    tensor = tensor.detach()
    if not tensor.data_ptr() % _ROW_ALIGNMENT and _in_rows(tensor, step):
        return plain_strides(tensor)
    import torch

    return tensor.clone(memory_format=torch.contiguous_format)


def require_rows(name: str, tensor: torch.Tensor, step: int) -> torch.Tensor:
    """A tensor (..., columns) that is written into, as kernels write it. Raises `UserError` for one of which `rows_of`
    would make a copy."""
    if tensor.data_ptr() % _ROW_ALIGNMENT or not _in_rows(tensor, step):
        raise UserError(
            f"{name} has strides {tuple(tensor.stride())} and starts at {tensor.data_ptr():#x}: its columns must lie "
            f"beside each other, and its rows at multiples of {_ROW_ALIGNMENT} bytes, none over another."
        )
    return plain_strides(tensor)


def require_contiguous(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """A tensor without gradients. Raises `UserError` for one that is not contiguous, or begins between multiples of 16
    bytes."""
    if not tensor.is_contiguous() or tensor.data_ptr() % _ROW_ALIGNMENT:
        raise UserError(
            f"{name} has strides {tuple(tensor.stride())} and starts at {tensor.data_ptr():#x}: pass it contiguous, "
            f"from a multiple of {_ROW_ALIGNMENT} bytes on."
        )
    return plain_strides(tensor.detach())


def _in_rows(tensor: torch.Tensor, step: int) -> bool:
    """Whether columns lie beside each other, and rows multiples of `step` elements apart, none over another. Strides of
    dimensions of size 1 say nothing."""
    if tensor.is_contiguous():
        return True
    if tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
        return False
    reach = tensor.shape[-1]
    for apart, size in sorted(zip(tensor.stride()[:-1], tensor.shape[:-1], strict=True)):
        if size > 1:
            if apart < reach or apart % step:
                return False
            reach += apart * (size - 1)
    return True


def plain_strides(tensor: torch.Tensor) -> torch.Tensor:
    """A view in which dimensions of size 1 have the strides that they have in a contiguous tensor: a kernel that is
    told strides wants multiples of 16 bytes."""
    if 1 not in tensor.shape:
        return tensor
    given = tensor.stride()
    plain = _plain(tensor.shape, given)
    return tensor if plain == given else tensor.as_strided(tensor.shape, plain)


# Every call with one query token asks it of each of its tensors, of the same few shapes.
@functools.lru_cache(maxsize=4096)
def _plain(shape: tuple[int, ...], given: tuple[int, ...]) -> tuple[int, ...]:
    """Given strides, with those of a contiguous tensor in dimensions of size 1."""
    strides, apart = list[int](), 1
    for size, step in zip(reversed(shape), reversed(given), strict=True):
        strides.insert(0, apart if size == 1 else step)
        apart = max(apart, strides[0] * size)
    return tuple(strides)


def result(
    name: str, given: torch.Tensor | None, shape: tuple[int, ...], dtype: Any, device: Any, *, strided: bool = False
) -> torch.Tensor:
    """A tensor for a result: the caller's, when it fits, or a new one. strided: the caller's may have any strides with
    which no element lies over another; of 16-bit values columns lie beside each other, and rows multiples of 16 bytes
    apart."""
    import torch

    if given is None:
        return torch.empty(shape, dtype=dtype, device=device)
    if not isinstance(given, torch.Tensor):
        raise UserError(f"{name} is a {type(given).__name__}: pass a torch tensor, or None for a new one.")
    if tuple(given.shape) != shape or given.dtype != dtype or given.device != device:
        raise UserError(
            f"{name} is {tuple(given.shape)} {given.dtype} on {given.device}: pass {shape} {dtype} on {device}."
        )
    needed = _NEEDED[given.element_size()]
    if not given.data_ptr() % needed and given.is_contiguous():
        return given
    if not strided:
        raise UserError(f"{name} must be contiguous and start at a multiple of {needed} bytes.")
    if needed == _ROW_ALIGNMENT:
        require_rows(name, given, VECTOR)
    elif given.data_ptr() % needed or not _in_rows(given.unsqueeze(-1), 1):
        raise UserError(
            f"{name} has strides {tuple(given.stride())} and starts at {given.data_ptr():#x}: it must start at a "
            f"multiple of {needed} bytes, with no element over another."
        )
    return given
