"""FlashInfer's `BatchMLAPagedAttentionWrapper`: dense with backends fa2 and fa3 (`flashinfer_fa2`, `flashinfer_fa3`),
and sparse (`flashinfer_sparse`); its ragged prefill (`flashinfer_ragged`).

    plan():  lengths and page ids go to the host, the library balances the splits there and copies its schedule back
    call:    one persistent kernel (attention, then the merge of the splits)

Two ways to call it (`Library.kind`):

    module   an object that scripts/fetch_peers.py builds from the sources inside FlashInfer's wheel: the functions that
             the wrapper itself calls, through TVM-FFI, for bfloat16 and int32. Needs no package and no compiler.
    package  the installed `flashinfer`, which compiles the same sources when they are first used (it needs nvcc).

Rows without keys and padding are handled: keys past the end are filled with zeros, not read.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from importlib import import_module
from typing import Any, ClassVar, NamedTuple

from mla_var3.catalogue import libraries
from mla_var3.catalogue.libraries import Library
from mla_var3.device import Requirement
from mla_var3.errors import Unsupported, UserError
from mla_var3.kernel.library import (
    LATENT,
    ROPE,
    Attached,
    PeerDecodePlan,
    PeerPrefillPlan,
    PeerSparsePlan,
    in_bf16,
    is_here,
    natural_lse,
    padded_values,
    page_indices,
    prefill_lse,
    single_pages,
    takes_bf16,
    takes_decode,
    value_columns,
)
from mla_var3.workload import sparse_decode
from mla_var3.workload.decode import ROUNDED_ONCE_MORE

_FLOAT_BYTES = 128 << 20  # what FlashInfer's documentation asks for
_INT_BYTES = 8 << 20
_CAUSAL = 1  # MaskMode of the library: 0 none, 1 causal


class Rows(NamedTuple):
    """What requests attend to, int32. starts (requests + 1,), on the CPU: their first query tokens. offsets (requests +
    1,), on the CPU: where their pages begin in `pages`, on the device. lens (requests,), on the CPU: their tokens."""

    starts: Any
    offsets: Any
    pages: Any
    lens: Any


class FlashInferCalls:
    """What plans of decode and of sparse decode share; they set `peer` and `backend`."""

    peer: ClassVar[str]
    compiled: Any
    problem: Any
    backend = ""
    # The partial results of a split request lie in the output's dtype until they are merged: 3.7e-6 of cosine
    # difference where other libraries have 2.1e-6, and 2.1e-6 without a split
    # (results/h200/traces/2026-11-24-flashinfer_parts.txt).
    cos_slack = ROUNDED_ONCE_MORE

    def attached(
        self, library: Library, q: Any, cache: Any, page_table: Any, seq_lens: Any, *, causal: bool
    ) -> Attached:
        """The call on q (b, s, h, 576) over cache (pages, page, 576). page_table (requests, any), seq_lens (requests,):
        of as many requests as share the b · s query tokens evenly."""
        import torch

        b, s, h, _ = q.shape
        offsets, pages, lens = page_indices(page_table, seq_lens, cache.shape[1])
        starts = torch.arange(0, b * s + 1, b * s // len(lens), dtype=torch.int32)
        rows = Rows(starts, offsets, pages.to(q.device), lens)
        flat = q.reshape(b * s, h, LATENT + ROPE)
        parts = (flat[..., :LATENT], flat[..., LATENT:], cache[..., :LATENT], cache[..., LATENT:])
        out = q.new_empty((b * s, h, LATENT))
        lse = torch.empty((b * s, h), dtype=torch.float32, device=q.device)
        attach = self._module if library.kind == "module" else self._package
        call, keep = attach(library, rows, parts, out, lse, causal)

        def read() -> tuple[Any, ...]:
            natural = natural_lse(lse, base2=True)
            return out.view(b, s, h, LATENT), natural.view(b, s, h).transpose(1, 2).contiguous()

        return Attached(call, read, keep=keep, outputs=(out, lse))

    def _shared(self, name: str, make: Callable[[], Any]) -> Any:
        """A buffer for all kernels bound through a plan: they are planned, and run, one after the other."""
        key = ("flashinfer", name)
        if key not in self.compiled:
            self.compiled[key] = make()
        return self.compiled[key]

    def _workspace(self, like: Any) -> Any:
        import torch

        return self._shared(
            f"partial results {like.device}",
            lambda: torch.empty(_FLOAT_BYTES, dtype=torch.uint8, device=like.device),
        )

    def _module(
        self, library: Library, rows: Rows, parts: Any, out: Any, lse: Any, causal: bool
    ) -> tuple[Any, tuple[Any, ...]]:
        import torch

        if out.dtype != torch.bfloat16:
            raise Unsupported(
                f"peer/{self.peer} was built for bf16; install flashinfer-python for {self.problem.dtype}."
            )
        module = _load_module(str(library.path))
        starts, offsets, pages, lens = rows
        device = out.device
        floats = self._workspace(out)
        ints = torch.empty(_INT_BYTES, dtype=torch.uint8, device=device)
        pinned = device.type == "cuda"
        staged = self._shared("schedule", lambda: torch.empty(_INT_BYTES, dtype=torch.uint8, pin_memory=pinned))
        heads = out.shape[1]
        info, used = module.plan(floats, ints, staged, starts, offsets, lens, heads, LATENT, causal)
        ints[: int(used)].copy_(staged[: int(used)])
        arguments = (
            floats,
            ints,
            info,
            *parts,
            pages,
            out,
            lse,
            _CAUSAL if causal else 0,
            heads,
            parts[2].shape[1],
            self.problem.scale,
            False,
            1.0,
            1.0,
            None,
        )
        run = module.run

        def call() -> None:
            run(*arguments)

        return call, (module, arguments)

    def _package(
        self, library: Library, rows: Rows, parts: Any, out: Any, lse: Any, causal: bool
    ) -> tuple[Any, tuple[Any, ...]]:
        from flashinfer.mla import BatchMLAPagedAttentionWrapper

        starts, offsets, pages, lens = rows
        q_nope, q_pe, ckv, kpe = parts
        with warnings.catch_warnings():
            # The newer releases deprecate this form of the arguments; it is the one that all releases have.
            warnings.simplefilter("ignore")
            wrapper = BatchMLAPagedAttentionWrapper(self._workspace(out), backend=self.backend)
            wrapper.plan(
                qo_indptr=starts.to(out.device),
                kv_indptr=offsets.to(out.device),
                kv_indices=pages,
                kv_len_arr=lens.to(out.device),
                num_heads=out.shape[1],
                head_dim_ckv=LATENT,
                head_dim_kpe=ROPE,
                page_size=ckv.shape[1],
                causal=causal,
                sm_scale=self.problem.scale,
                q_data_type=out.dtype,
                kv_data_type=out.dtype,
            )

        def call() -> None:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                wrapper.run(q_nope=q_nope, q_pe=q_pe, ckv_cache=ckv, kpe_cache=kpe, out=out, lse=lse, return_lse=True)

        return call, (wrapper, rows)


class FlashInferPlan(FlashInferCalls, PeerDecodePlan):
    """Base of the two backends of decode; subclasses set `peer`, `requires` and `backend`."""

    def attach(self, library: Library, *inputs: Any) -> Attached:
        q, kv_cache, page_table, seq_lens = inputs
        return self.attached(library, q, kv_cache[:, :, 0], page_table, seq_lens, causal=self.problem.causal)


def _load_module(path: str) -> Any:
    return _tvm_ffi().load_module(path)


def _tvm_ffi() -> Any:
    """TVM-FFI: the installed one, else the one that was fetched beside the object."""
    if not libraries.package_dirs("tvm_ffi"):
        beside = (folder.parents[1] / "fallback" for folder in libraries.fetched_dirs())
        sys.path.extend(str(folder) for folder in beside if (folder / "tvm_ffi").is_dir())
    try:
        return import_module("tvm_ffi")
    except ImportError as error:
        raise UserError(
            f"FlashInfer's object is loaded by TVM-FFI, which does not work here ({error}): pip install apache-tvm-ffi."
        ) from error


class FlashInferFa3Plan(FlashInferPlan):
    """FlashInfer's paged MLA decode, backend fa3."""

    peer = "flashinfer_fa3"
    backend = "fa3"
    requires = Requirement(archs=("sm_90a",), dtypes=("bf16", "fp16"), problem=takes_decode("flashinfer_fa3"))


class FlashInferFa2Plan(FlashInferPlan):
    """FlashInfer's paged MLA decode, backend fa2.

    It sums a row of P after P has been rounded to the cache's dtype, so its log-sum-exp is off by up to that rounding,
    2^-9 in bf16, in rows of few keys. Our kernels sum ahead of the rounding, as the bound of decode has it.
    """

    lse_slack = 2.0e-3  # log(1 + 2^-9), rounded up

    peer = "flashinfer_fa2"
    backend = "fa2"
    requires = Requirement(archs=("sm_90a",), dtypes=("bf16", "fp16"), problem=takes_decode("flashinfer_fa2"))


class FlashInferSparsePlan(FlashInferCalls, PeerSparsePlan):
    """FlashInfer's paged MLA decode, backend fa3, over a bf16 cache: query tokens as requests, indices as pages of 1.

    As in `fa3_sparse`, a cache of layout v32 is converted ahead of the call, which is not timed, and the call reads
    1152 bytes a token where the problem counts 656. Indices that name no token are left out on the host, where the
    library makes its schedule. It reads a q with strides, but has one dimension for requests and query tokens: a
    strided q of several query tokens is copied ahead of the call too.
    """

    peer = "flashinfer_sparse"
    backend = "fa3"
    requires = Requirement(
        archs=("sm_90a",), dtypes=("bf16",), problem=takes_bf16("flashinfer_sparse"), options=("strided",)
    )

    def attach(self, library: Library, *inputs: Any) -> Attached:
        given = sparse_decode.named(self.problem, *inputs)
        q = given["q"]
        cache = in_bf16(self.problem.cache, given["cache"]).view(-1, 1, q.shape[3])
        return self.attached(library, q, cache, *single_pages(given), causal=False)


class FlashInferRaggedPlan(PeerPrefillPlan):
    """FlashInfer's `BatchPrefillWithRaggedKVCacheWrapper` for prefill, with its backend for Hopper.

    plan(): lengths go to the host, and the library deals tiles to CTAs there. A call is one kernel, which writes into
    our `out` and `lse`. It is the installed package, which compiles its kernel when it first meets head dims (nvcc).
    Values narrower than keys it takes as 128 beside 192 only: others are padded with zeros ahead of the call.
    """

    peer = "flashinfer_ragged"
    requires = Requirement(archs=("sm_90a",), problem=is_here("flashinfer_ragged"), options=("grouped",))

    def attach(self, library: Library, *inputs: Any) -> Attached:
        import torch

        pd, (q, k, v, of_q, of_k) = self.problem, inputs
        columns = value_columns(q.shape[-1], v.shape[-1])
        values = padded_values(v, columns)
        wrapper = import_module("flashinfer").BatchPrefillWithRaggedKVCacheWrapper(
            torch.empty(_FLOAT_BYTES, dtype=torch.uint8, device=q.device), "NHD", backend="fa3"
        )
        wrapper.plan(
            of_q, of_k, pd.h, pd.h_kv, q.shape[-1], head_dim_vo=columns, causal=pd.causal, sm_scale=pd.scale,
            q_data_type=q.dtype, kv_data_type=k.dtype,
        )  # fmt: skip
        out = q.new_empty((*q.shape[:2], columns))
        lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)

        def call() -> None:
            wrapper.run(q, k, values, out=out, lse=lse, return_lse=True)

        def read() -> tuple[Any, ...]:
            return out[..., : v.shape[-1]], prefill_lse(lse, base2=True).t()

        return Attached(call, read, keep=(wrapper, *inputs), outputs=(out, lse))
