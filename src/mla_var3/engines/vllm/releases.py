"""What differs between the releases of vLLM whose contracts are known (tests/engines/contracts).

Of a release that is not known the nearest known one is followed.
"""

from __future__ import annotations

import copyreg
import functools
import importlib
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import metadata
from typing import Any


@dataclass(frozen=True)
class Release:
    """names: whether its registries take new names. sparse_impl: path of what implementations of sparse attention are
    derived from. sparse_init: whether that has a constructor. pieces: whether a piece of the context of chunks knows
    its offsets, or is a number. trims: whether the second model runner may change on the device how many query tokens
    a request has. counts: whether the kernel that makes slots of the chosen tokens also counts them and puts them in
    front of each row, without a kernel more."""

    version: str
    names: bool
    sparse_impl: str
    sparse_init: bool
    pieces: bool
    trims: bool
    counts: bool


SPARSE = "vllm.model_executor.layers.attention.sparse_mla_attention.SparseMLACommonImpl"
RELEASES = (
    Release("0.25.1", False, "vllm.v1.attention.backend.SparseMLAAttentionImpl", False, False, False, False),
    Release("0.33.0", True, SPARSE, True, True, True, True),
)


#: Names under which vLLM finds a backend of attention and of prefill, and the path of its class.
BACKENDS = {
    "MLA_VAR3": "mla_var3.engines.vllm.dense.MlaVar3Backend",
    "MLA_VAR3_SPARSE": "mla_var3.engines.vllm.sparse.MlaVar3SparseBackend",
}
PREFILL = {"MLA_VAR3": "mla_var3.engines.vllm.prefill.MlaVar3PrefillBackend"}


@functools.cache
def installed() -> str:
    return metadata.version("vllm")


def _number(version: str) -> int:
    """Of "0.25.1" 25001."""
    parts = [int(digits) for digits in re.findall(r"\d+", version.partition("+")[0])[:3]]
    major, minor, patch = (*parts, 0, 0, 0)[:3]
    return (1000 * major + minor) * 1000 + patch


@functools.cache
def release() -> Release:
    """The known release that is the installed one, or the nearest to it."""
    return min(RELEASES, key=lambda known: abs(_number(known.version) - _number(installed())))


def unknown() -> str:
    """One sentence where the installed release is not known."""
    if installed() == release().version:
        return ""
    known = ", ".join(each.version for each in RELEASES)
    return f"vLLM {installed()} is not known to mla_var3, which knows {known}: it is taken for {release().version}."


def add_backends() -> None:
    """Adds our names and paths of classes to vLLM's registries, unless they are there."""
    from vllm.v1.attention.backends.mla.prefill.registry import MLAPrefillBackendEnum, register_mla_prefill_backend
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    for registry, add, named in (
        (AttentionBackendEnum, register_backend, BACKENDS),
        (MLAPrefillBackendEnum, register_mla_prefill_backend, PREFILL),
    ):
        for name, path in named.items():
            if name in registry.__members__:
                continue
            if release().names:
                add(name, path)
            else:
                _add(registry, name, path)
        copyreg.pickle(registry, _reduced)


def _add(registry: Any, name: str, path: str) -> None:
    """Gives a registry that takes no new names a member more, as later releases do it."""
    member = object.__new__(registry)
    member._name_, member._value_ = name, path
    setattr(registry, name, member)
    registry._member_map_[name] = registry._value2member_map_[path] = member
    registry._member_names_.append(name)


def _reduced(member: Any) -> tuple[Any, ...]:
    """How a member of a registry goes to another process, which may not have called the plug-in yet."""
    return _known, (type(member), member.name)


def _known(registry: Any, name: str) -> Any:
    if name not in registry.__members__:
        add_backends()
    return registry[name]


def base_of_sparse() -> Any:
    """The class that implementations of sparse attention are derived from."""
    module, _, name = release().sparse_impl.rpartition(".")
    return getattr(importlib.import_module(module), name)


def init_sparse(impl: Any, init: Callable[..., None], given: Mapping[str, Any], indexer: Any, buffer: Any) -> None:
    """Does what `init`, of the class that `impl` is derived from, does in releases where it is not abstract. given: its
    arguments by name. indexer, buffer: who holds the chosen tokens: layers without an indexer have the buffer alone."""
    if release().sparse_init:
        init(**given, indexer=indexer, topk_indices_buffer=buffer)
        return
    for name in ("num_heads", "head_size", "num_kv_heads", "kv_cache_dtype", "kv_lora_rank", "kv_b_proj"):
        setattr(impl, name, given[name])
    impl.scale = float(given["scale"])
    impl.topk_indices_buffer = buffer if indexer is None else indexer.topk_indices_buffer


def keeps_counts(config: Any) -> bool:
    """Whether requests have as many query tokens as the host says, when a graph is replayed too."""
    return not (release().trims and config.use_v2_model_runner)


def of_context(prefill: Any, piece: Any) -> tuple[Any, Any]:
    """Where the query tokens of each request and its keys begin in a piece of the context; piece: as vLLM names it."""
    if release().pieces:
        return piece.query_start_loc, piece.cu_seq_lens
    return prefill.query_start_loc, prefill.chunked_context.cu_seq_lens[piece]
