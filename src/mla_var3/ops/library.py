"""The functions of this room as operators of torch: what `torch.compile`, `torch.export` and fake tensors see of them.

    torch.ops.mla_var3.mla_decode         (out, lse) as new tensors
    torch.ops.mla_var3.mla_decode_into    writes into the caller's out and lse
    torch.ops.mla_var3.sparse_mla_decode         (out, lse) as new tensors
    torch.ops.mla_var3.sparse_mla_decode_into    writes into the caller's out and lse
    torch.ops.mla_var3.packed_mla_decode         (out, lse) as new tensors
    torch.ops.mla_var3.packed_mla_decode_into    writes into the caller's out and lse
    torch.ops.mla_var3.mla_prefill        (out, lse) as new tensors
    torch.ops.mla_var3.mla_prefill_into   writes into the caller's out and lse
    torch.ops.mla_var3.mla_chunk_prefill  (out, lse) as new tensors
    torch.ops.mla_var3.rmsnorm            (out, second, new residual), without columns where not asked for
    torch.ops.mla_var3.rope_append        writes into the caller's out and kv_cache
    torch.ops.mla_var3.latent_append      writes into the caller's kv_cache
    torch.ops.mla_var3.index_append       writes into the caller's cache
    torch.ops.mla_var3.indexed_append     writes into the caller's out, kv_cache and index_cache
    torch.ops.mla_var3.absorb_gemm        out as a new tensor
    torch.ops.mla_var3.absorb_gemm_into   writes into the caller's out
    torch.ops.mla_var3.merge_partials     (out, lse) as new tensors
    torch.ops.mla_var3.indexer_logits     logits as a new tensor
    torch.ops.mla_var3.topk_indices       indices as a new tensor
    torch.ops.mla_var3.indexer_topk       indices as a new tensor

`mla_var3.ops.tracing` says which calls of a function go through its operator, and is given the way there here.
`flash_mla.flash_mla_with_kvcache` calls `mla_decode`, `packed_mla_decode` or `sparse_mla_decode`, and
`flash_attn_varlen_func` calls `mla_prefill`, so they are traced into these operators. Nothing here has a gradient:
tensors are detached, as in an eager call.

Operators exist once torch is imported, whichever of torch and this package comes first, so that a compiled or exported
program finds them. Importing this package does not import torch.
"""

from __future__ import annotations

import functools
import importlib.abc
import sys
from typing import TYPE_CHECKING, Any

from mla_var3.ops import flash_mla
from mla_var3.ops.chunk_prefill import mla_chunk_prefill
from mla_var3.ops.context_parallel import merge_partials
from mla_var3.ops.decode import LATENT, mla_decode
from mla_var3.ops.indexed import indexed_append
from mla_var3.ops.indexer import index_append, indexer_logits, indexer_topk, topk_indices
from mla_var3.ops.layer import absorb_gemm, latent_append, require_side, rmsnorm, rope_append
from mla_var3.ops.prefill import mla_prefill, require_no_gradient
from mla_var3.ops.sparse import packed_mla_decode, sparse_mla_decode
from mla_var3.ops.tracing import eager, through
from mla_var3.packed_cache import VALUES
from mla_var3.workload.indexer_logits import PAGE, rows_apart

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType

    import torch

    from mla_var3.ops.engine import DecodeSchedule

NAMESPACE = "mla_var3"

_ARGUMENTS = (
    "Tensor q, Tensor kv_cache, Tensor page_table, Tensor seq_lens, *, float? scale=None, bool causal=False, "
    "Tensor? cu_seqlens_q=None, Tensor? mask=None, int head_dim_v=512, int? fixed_split=None, str? version=None"
)
_SPARSE = (
    "Tensor q, Tensor kv_cache, Tensor indices, *, str layout='v32', float? scale=None, Tensor? cache_scale=None, "
    "Tensor? topk_lens=None, Tensor? sink=None, Tensor? extra_cache=None, Tensor? extra_indices=None, "
    "Tensor? extra_topk_lens=None, str? extra_layout=None, int? fixed_split=None, str? version=None"
)
_PACKED = (
    "Tensor q, Tensor kv_cache, Tensor page_table, Tensor seq_lens, *, str layout='v32', float? scale=None, "
    "Tensor? cache_scale=None, Tensor? sink=None, int? fixed_split=None, str? version=None"
)
_PROMPTS = (
    "Tensor q, Tensor k, Tensor v, Tensor cu_seqlens_q, Tensor cu_seqlens_k, *, float? scale=None, bool causal=True, "
    "str? version=None"
)
_INDEXER = "Tensor? starts=None, Tensor? scales=None, Tensor? page_table=None, {}str? version=None) -> Tensor"
_PRODUCT = "Tensor x, Tensor weight, str side, *, str? version=None"
# Not named out: dynamo wants such an argument contiguous, and these may be slices.
SCHEMAS = {
    "mla_decode": f"mla_decode({_ARGUMENTS}) -> (Tensor out, Tensor lse)",
    "mla_decode_into": f"mla_decode_into({_ARGUMENTS}, Tensor(a!) target, Tensor(b!) lse) -> ()",
    "sparse_mla_decode": f"sparse_mla_decode({_SPARSE}) -> (Tensor out, Tensor lse)",
    "sparse_mla_decode_into": f"sparse_mla_decode_into({_SPARSE}, Tensor(a!) target, Tensor(b!) lse) -> ()",
    "packed_mla_decode": f"packed_mla_decode({_PACKED}) -> (Tensor out, Tensor lse)",
    "packed_mla_decode_into": f"packed_mla_decode_into({_PACKED}, Tensor(a!) target, Tensor(b!) lse) -> ()",
    "mla_prefill": f"mla_prefill({_PROMPTS}) -> (Tensor out, Tensor lse)",
    "mla_prefill_into": f"mla_prefill_into({_PROMPTS}, Tensor(a!) target, Tensor(b!) lse) -> ()",
    "mla_chunk_prefill": (
        "mla_chunk_prefill(Tensor q, Tensor kv_cache, Tensor page_table, Tensor seq_lens, Tensor cu_seqlens_q, "
        "Tensor kv_b, *, SymInt prefix_tokens, float? scale=None, str? way=None) -> (Tensor out, Tensor lse)"
    ),
    "rmsnorm": (
        "rmsnorm(Tensor x, Tensor weight, Tensor? second_weight=None, Tensor? residual=None, *, float eps=1e-6, "
        "str? version=None) -> (Tensor out, Tensor second, Tensor new_residual)"
    ),
    "rope_append": (
        "rope_append(Tensor q, Tensor latent, Tensor rope, Tensor positions, Tensor slots, Tensor table, *, "
        "bool interleaved=True, str? layout=None, Tensor? cache_scale=None, bool powers=True, str? version=None, "
        "Tensor(a!) out, Tensor(b!) kv_cache) -> ()"
    ),
    "latent_append": (
        "latent_append(Tensor latent, Tensor slots, Tensor(a!) kv_cache, *, str layout, Tensor? cache_scale=None, "
        "bool powers=True, str? version=None) -> ()"
    ),
    "index_append": (
        "index_append(Tensor k, Tensor weight, Tensor bias, Tensor positions, Tensor slots, Tensor table, "
        "Tensor(a!) cache, *, bool interleaved=False, bool powers=True, str? version=None) -> ()"
    ),
    "indexed_append": (
        "indexed_append(Tensor q, Tensor latent, Tensor rope, Tensor k, Tensor weight, Tensor bias, Tensor positions, "
        "Tensor slots, Tensor table, *, bool interleaved=True, bool interleaved_keys=False, bool powers=True, "
        "bool powers_of_keys=True, str? version=None, Tensor(a!) out, Tensor(b!) kv_cache, Tensor(c!) index_cache) "
        "-> ()"
    ),
    "absorb_gemm": f"absorb_gemm({_PRODUCT}) -> Tensor",
    "absorb_gemm_into": f"absorb_gemm_into({_PRODUCT}, Tensor(a!) target) -> ()",
    "merge_partials": "merge_partials(Tensor partials, Tensor lse, *, str? version=None) -> (Tensor out, Tensor total)",
    "indexer_logits": (
        "indexer_logits(Tensor q, Tensor keys, Tensor weights, Tensor ends, *, "
        + _INDEXER.format("ScalarType? dtype=None, bool clean=False, ")
    ),
    "topk_indices": (
        "topk_indices(Tensor logits, Tensor ends, int k, *, Tensor? starts=None, Tensor? page_table=None, "
        "str? version=None) -> Tensor"
    ),
    "indexer_topk": (
        "indexer_topk(Tensor q, Tensor keys, Tensor weights, Tensor ends, int k, *, " + _INDEXER.format("")
    ),
}

_registered: list[Any] = []  # torch drops the operators of a library that nobody holds


# ---------------------------------------------------------------- from a function to its operator
def _call(name: str, **given: Any) -> Any:
    """What an operator returns for tensors, which lose their gradients, and other arguments."""
    import torch

    operator = getattr(torch.ops.mla_var3, name)
    return operator(**{key: x.detach() if isinstance(x, torch.Tensor) else x for key, x in given.items()})


def _call_attention(
    name: str,
    *,
    return_lse: bool = False,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
    schedule: DecodeSchedule | None = None,  # of eager calls: here each deals out its own work
    **given: Any,
) -> Any:
    """Of `mla_decode`, `sparse_mla_decode` and `packed_mla_decode`, which have two operators each."""
    import torch

    if out is None and lse is None:
        out, lse = _call(name, **given)
    else:
        q, width = given["q"], LATENT if name == "mla_decode" else VALUES
        like_out, like_lse = _shapes(q, given.get("cu_seqlens_q"), given.get("head_dim_v", width))
        out = q.new_empty(like_out) if out is None else out
        lse = q.new_empty(like_lse, dtype=torch.float32) if lse is None else lse
        _call(f"{name}_into", **given, target=out, lse=lse)
    return (out, lse) if return_lse else out


def _shapes(q: torch.Tensor, cu_seqlens_q: torch.Tensor | None, head_dim_v: int) -> tuple[tuple[Any, ...], ...]:
    """Of out and lse."""
    if cu_seqlens_q is not None:
        tokens, h, _ = q.shape
        return (tokens, h, head_dim_v), (tokens, h)
    b, s, h, _ = q.shape
    return (b, s, h, head_dim_v), (b, h, s)


def _call_prefill(
    *,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    return_lse: bool = False,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
    **given: Any,
) -> Any:
    import torch

    require_no_gradient(q=q, k=k, v=v)
    if out is None and lse is None:
        out, lse = _call("mla_prefill", q=q, k=k, v=v, **given)
    else:
        n, h, _ = q.shape
        out = q.new_empty((n, h, v.shape[2])) if out is None else out
        lse = q.new_empty((h, n), dtype=torch.float32) if lse is None else lse
        _call("mla_prefill_into", q=q, k=k, v=v, **given, target=out, lse=lse)
    return (out, lse) if return_lse else out


def _call_chunk_prefill(
    *, return_lse: bool = False, version: None = None, q: torch.Tensor, kv_cache: torch.Tensor, kv_b: torch.Tensor,
    **given: Any,
) -> Any:  # fmt: skip
    require_no_gradient(q=q, kv_cache=kv_cache, kv_b=kv_b)
    both = _call("mla_chunk_prefill", q=q, kv_cache=kv_cache, kv_b=kv_b, **given)
    return both if return_lse else both[0]


def _call_rmsnorm(**given: Any) -> Any:
    out, second, summed = _call("rmsnorm", **given)
    if given.get("residual") is not None:
        return out, summed
    return out if given.get("second_weight") is None else (out, second)


def _call_absorb_gemm(*, side: str, out: torch.Tensor | None = None, **given: Any) -> Any:
    require_side(side)
    if out is None:
        return _call("absorb_gemm", side=side, **given)
    _call("absorb_gemm_into", side=side, **given, target=out)
    return out


through.update(
    mla_decode=functools.partial(_call_attention, "mla_decode"),
    sparse_mla_decode=functools.partial(_call_attention, "sparse_mla_decode"),
    packed_mla_decode=functools.partial(_call_attention, "packed_mla_decode"),
    mla_prefill=_call_prefill,
    mla_chunk_prefill=_call_chunk_prefill,
    rmsnorm=_call_rmsnorm,
    rope_append=functools.partial(_call, "rope_append"),
    latent_append=functools.partial(_call, "latent_append"),
    index_append=functools.partial(_call, "index_append"),
    indexed_append=functools.partial(_call, "indexed_append"),
    absorb_gemm=_call_absorb_gemm,
    merge_partials=functools.partial(_call, "merge_partials"),
    indexer_logits=functools.partial(_call, "indexer_logits"),
    topk_indices=functools.partial(_call, "topk_indices"),
    indexer_topk=functools.partial(_call, "indexer_topk"),
)


# ---------------------------------------------------------------- what the operators do
def _attention(function: Callable[..., Any]) -> tuple[Callable[..., Any], Callable[..., None]]:
    """The two operators of a function: that which returns (out, lse), and that which writes them."""
    compute = eager(function)

    def run(*args: Any, version: str | None = None, **options: Any) -> Any:
        return compute(*args, return_lse=True, kernel=version, **options)

    def into(*args: Any, target: torch.Tensor, **options: Any) -> None:
        run(*args, out=target, **options)

    return run, into


def _fake_decode(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    page_table: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    cu_seqlens_q: torch.Tensor | None = None,
    head_dim_v: int = LATENT,
    **options: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    import torch

    out, lse = _shapes(q, cu_seqlens_q, head_dim_v)
    return q.new_empty(out), q.new_empty(lse, dtype=torch.float32)


def _fake_over_packed(q: torch.Tensor, *args: Any, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
    import torch

    out, lse = _shapes(q, None, VALUES)
    return q.new_empty(out), q.new_empty(lse, dtype=torch.float32)


def _fake_prefill(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *args: Any, **options: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    import torch

    n, h, _ = q.shape
    return q.new_empty((n, h, v.shape[2])), q.new_empty((h, n), dtype=torch.float32)


def _chunk_prefill(*args: Any, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
    out, lse = eager(mla_chunk_prefill)(*args, return_lse=True, **options)
    return out, lse.contiguous()  # as the fake one


def _fake_chunk_prefill(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    page_table: torch.Tensor,
    seq_lens: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    kv_b: torch.Tensor,
    **options: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    import torch

    n, h, columns = q.shape
    d = columns - (kv_cache.shape[-1] - kv_b.shape[1])
    return q.new_empty((n, h, kv_b.shape[0] // h - d)), q.new_empty((n, h), dtype=torch.float32)


def _rmsnorm(
    x: torch.Tensor,
    weight: torch.Tensor,
    second_weight: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    *,
    version: str | None = None,
    **options: Any,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    found = eager(rmsnorm)(x, weight, second_weight=second_weight, residual=residual, kernel=version, **options)
    # An operator's results are different tensors, those without columns too.
    if not isinstance(found, tuple):
        return found, x.new_empty((len(x), 0)), x.new_empty((len(x), 0))
    out, more = found
    return (out, x.new_empty((len(x), 0)), more) if second_weight is None else (out, more, x.new_empty((len(x), 0)))


def _fake_rmsnorm(
    x: torch.Tensor,
    weight: torch.Tensor,
    second_weight: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    **options: Any,
) -> tuple[torch.Tensor, ...]:
    second = 0 if second_weight is None else second_weight.shape[0]
    return tuple(x.new_empty((x.shape[0], n)) for n in (weight.shape[0], second, 0 if residual is None else x.shape[1]))


def _absorb_gemm(*args: Any, version: str | None = None, **options: Any) -> torch.Tensor:
    return eager(absorb_gemm)(*args, kernel=version, **options)


def _absorb_gemm_into(*args: Any, target: torch.Tensor, **options: Any) -> None:
    _absorb_gemm(*args, out=target, **options)


def _fake_absorb_gemm(x: torch.Tensor, weight: torch.Tensor, side: str, **options: Any) -> torch.Tensor:
    n, h, _ = x.shape
    return x.new_empty((n, h, weight.shape[1] if side == "q" else weight.shape[0] // (2 * h)))


def _merge_partials(
    partials: torch.Tensor, lse: torch.Tensor, *, version: str | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    return eager(merge_partials)(partials, lse, kernel=version)


def _fake_merge_partials(
    partials: torch.Tensor, lse: torch.Tensor, **options: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    return partials.new_empty(partials.shape[1:]), lse.new_empty(lse.shape[1:])


def _of(function: Callable[..., Any]) -> Callable[..., Any]:
    """The operator of a function that returns a new tensor, or writes into one that it is given."""
    compute = eager(function)

    def run(*args: Any, version: str | None = None, **options: Any) -> Any:
        return compute(*args, kernel=version, **options)

    return run


def _fake_indexer_logits(
    q: torch.Tensor,
    keys: torch.Tensor,
    *args: Any,
    page_table: torch.Tensor | None = None,
    dtype: torch.dtype | None = None,
    **options: Any,
) -> torch.Tensor:
    import torch

    rows, columns = (len(q), len(keys)) if page_table is None else (q.shape[0] * q.shape[1], PAGE * page_table.shape[1])
    return rows_apart(q, rows, columns, dtype or torch.float32)


def _fake_topk(logits: torch.Tensor, ends: torch.Tensor, k: int, **options: Any) -> torch.Tensor:
    import torch

    return logits.new_empty((logits.shape[0], k), dtype=torch.int32)


def _fake_indexer_topk(
    q: torch.Tensor, keys: torch.Tensor, weights: torch.Tensor, ends: torch.Tensor, k: int, **options: Any
) -> torch.Tensor:
    import torch

    rows = q.shape[0] if q.dim() == 3 else q.shape[0] * q.shape[1]
    return q.new_empty((rows, k), dtype=torch.int32)


def _fake_into(*args: Any, **options: Any) -> None:
    """Nothing comes back."""


# ---------------------------------------------------------------- registering
def register() -> None:
    """Makes the operators, once in a process; torch is imported already."""
    import torch

    if _registered:
        return
    decode, decode_into = _attention(mla_decode)
    sparse, sparse_into = _attention(sparse_mla_decode)
    packed, packed_into = _attention(packed_mla_decode)
    prefill, prefill_into = _attention(mla_prefill)
    library = torch.library.Library(NAMESPACE, "DEF")
    _registered.append(library)
    functions: dict[str, tuple[Any, Any]] = {
        "mla_decode": (decode, _fake_decode),
        "mla_decode_into": (decode_into, _fake_into),
        "sparse_mla_decode": (sparse, _fake_over_packed),
        "sparse_mla_decode_into": (sparse_into, _fake_into),
        "packed_mla_decode": (packed, _fake_over_packed),
        "packed_mla_decode_into": (packed_into, _fake_into),
        "mla_prefill": (prefill, _fake_prefill),
        "mla_prefill_into": (prefill_into, _fake_into),
        "mla_chunk_prefill": (_chunk_prefill, _fake_chunk_prefill),
        "rmsnorm": (_rmsnorm, _fake_rmsnorm),
        "rope_append": (_of(rope_append), _fake_into),
        "latent_append": (_of(latent_append), _fake_into),
        "index_append": (_of(index_append), _fake_into),
        "indexed_append": (_of(indexed_append), _fake_into),
        "absorb_gemm": (_absorb_gemm, _fake_absorb_gemm),
        "absorb_gemm_into": (_absorb_gemm_into, _fake_into),
        "merge_partials": (_merge_partials, _fake_merge_partials),
        "indexer_logits": (_of(indexer_logits), _fake_indexer_logits),
        "topk_indices": (_of(topk_indices), _fake_topk),
        "indexer_topk": (_of(indexer_topk), _fake_indexer_topk),
    }
    # A cache's pages may lie apart, and another layout would be a copy of it: tensors arrive as they were traced. A
    # capture of one's own may hold a call; the graphs that Inductor makes refuse workspaces that live on in their pool.
    tags = (torch.Tag.needs_exact_strides, torch.Tag.cudagraph_unsafe)
    for name, (run, fake) in functions.items():
        library.define(SCHEMAS[name], tags=tags)
        library.impl(name, run, "CompositeExplicitAutograd")
        torch.library.register_fake(f"{NAMESPACE}::{name}", fake, lib=library)
    # What torch.compiler.assume_constant_result does, which imports the whole tracer first, for a second.
    flash_mla.multiprocessors._dynamo_marked_constant = True  # type: ignore[attr-defined]


class _AfterTorch(importlib.abc.MetaPathFinder):
    """Lets the other finders find torch, and calls `register` once it has been imported."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name != "torch":
            return None
        others = (finder for finder in sys.meta_path if finder is not self)
        spec = next((spec for finder in others if (spec := finder.find_spec(name, path, target)) is not None), None)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            if self in sys.meta_path:
                sys.meta_path.remove(self)
            register()

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def register_with_torch() -> None:
    """Registers now where torch is imported, else as soon as it is."""
    if "torch" in sys.modules:
        register()
    elif not any(isinstance(finder, _AfterTorch) for finder in sys.meta_path):
        sys.meta_path.insert(0, _AfterTorch())
