"""Libraries that choose the k largest of rows: torch (`torch_topk`), FlashInfer (`flashinfer_topk`) and SGLang
(`sglang_topk`). Inputs and output of `workload.topk`, rows of one length from their first column on.

They leave open which of the values that equal the k-th they choose, and in which order. Reading a result therefore puts
the lowest columns of these in their places; no measured time has this in it.
"""

from __future__ import annotations

import ctypes
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, Any

from mla_var3.catalogue import libraries
from mla_var3.catalogue.libraries import Library
from mla_var3.device import Requirement
from mla_var3.errors import UserError, Verdict
from mla_var3.kernel.library import Attached, NoKnobs, PeerMixin, is_here
from mla_var3.runtime.plan import KernelPlan
from mla_var3.workload import topk

if TYPE_CHECKING:
    from collections.abc import Callable

    from mla_var3.workload.topk import TopkProblem

#: FlashInfer keeps the state of rows that are several CTAs' in so many bytes, of 0 before its first call.
STATES = 1 << 20
#: Logits of which reading a result makes masks at a time.
CHUNK = 1 << 26
#: Most rows for which SGLang's function of one query token a request is called; beyond, that of prompts.
SGLANG_DECODE = 512


def lowest_of_ties(logits: Any, indices: Any) -> Any:
    """Indices (n, k) into rows of logits (n, t), in ascending order, int32, where those of values that equal the least
    chosen one are the lowest columns that hold it. Indices that name no columns stay as they are."""
    import torch

    n, t = logits.shape
    out, step = indices.int().clone(), max(1, CHUNK // t)
    if bool(((out < 0) | (out >= t)).any()):
        return out
    for first in range(0, n, step):
        rows, chosen = logits[first : first + step], out[first : first + step].long()
        values = rows.gather(1, chosen)
        least = values.amin(1, keepdim=True)
        taken = torch.zeros(rows.shape, dtype=torch.bool, device=rows.device).scatter_(1, chosen, values > least)
        equal = rows == least
        taken |= equal & (equal.cumsum(1, dtype=torch.int32) <= (values == least).sum(1, keepdim=True))
        if bool((taken.sum(1) == chosen.shape[1]).all()):
            out[first : first + step] = taken.nonzero()[:, 1].view(chosen.shape).int()
    return out


def takes(peer: str, dtypes: tuple[str, ...], most: int = 2048) -> Callable[[TopkProblem], Verdict]:
    """A predicate: rows of one length, as long as they lie in memory, and the library is here."""

    def verdict(problem: TopkProblem) -> Verdict:
        if problem.table or problem.s > 1 or problem.lengths != "uniform":
            return Verdict.no(f"peer/{peer} is called with rows of one length, without a page table")
        if problem.dtype not in dtypes:
            return Verdict.no(f"peer/{peer} takes {' and '.join(dtypes)}; the problem is {problem.dtype}")
        if not problem.topk <= min(most, problem.t):
            return Verdict.no(f"peer/{peer} is called for 1 to {most:,} of the row's logits")
        return is_here(peer)(problem)

    return verdict


class PeerTopkPlan(PeerMixin, KernelPlan):
    """A library's top-k: output (indices,), made by the library or for it."""

    workload = topk.WORKLOAD
    tiling_type = NoKnobs
    plans_lengths = False
    leaves_out = tuple(name for name in topk.CASES if name != "own")


class TorchTopkPlan(PeerTopkPlan):
    """torch.topk, unsorted. It writes values and indices in int64, and makes both in every call."""

    peer = "torch_topk"
    allocates = True
    requires = Requirement(
        archs=("sm_80+",), dtypes=("fp32", "bf16"), problem=takes("torch_topk", ("fp32", "bf16"), 1 << 30)
    )

    def attach(self, library: Library, *inputs: Any) -> Attached:
        import torch

        logits, k = inputs[0], self.problem.topk
        made: list[Any] = [logits.new_zeros((len(logits), k), dtype=torch.int64)]

        def call() -> None:
            made[0] = logits.topk(k, sorted=False).indices

        return Attached(call, lambda: (lowest_of_ties(logits, made[0]),), made=made, count=1)


class FlashInferTopkPlan(PeerTopkPlan):
    """FlashInfer's `top_k_ragged_transform` as it is called by default, not deterministic: by its dispatch either one
    CTA a row, or several that add up histograms in global memory."""

    peer = "flashinfer_topk"
    requires = Requirement(archs=("sm_90a",), dtypes=("fp32",), problem=takes("flashinfer_topk", ("fp32",)))

    def attach(self, library: Library, *inputs: Any) -> Attached:
        import torch

        logits, starts, ends = inputs
        rows, columns = logits.shape
        if logits.stride(0) != columns:
            raise UserError(f"peer/{self.peer} takes rows that follow each other: use a multiple of 128 logits.")
        lengths, k = ends - starts, self.problem.topk
        out = torch.empty((rows, k), dtype=torch.int32, device=logits.device)
        states = torch.zeros(STATES, dtype=torch.uint8, device=logits.device)
        run = ctypes.CDLL(str(library.path)).flashinfer_topk
        run.argtypes = [ctypes.c_void_p] * 5 + [ctypes.c_int32] * 3 + [ctypes.c_void_p]
        pointers = [x.data_ptr() for x in (logits, lengths, starts, out, states)]

        def call() -> None:
            status = run(*pointers, rows, columns, k, torch.cuda.current_stream().cuda_stream)
            if status:
                raise UserError(f"FlashInfer's top-k failed with CUDA's error {status}.")

        return Attached(
            call, lambda: (lowest_of_ties(logits, out),), workspaces=(states,), keep=(lengths,), outputs=(out,), count=1
        )


class SglangTopkPlan(PeerTopkPlan):
    """SGLang's top-k, version 2: up to 512 rows as in its decode step, behind a plan that layers share and that is made
    here once, else as for prompts."""

    peer = "sglang_topk"
    requires = Requirement(archs=("sm_90a",), dtypes=("fp32",), problem=takes("sglang_topk", ("fp32",)))

    def attach(self, library: Library, *inputs: Any) -> Attached:
        import torch

        logits, starts, ends = inputs
        rows, k = len(logits), self.problem.topk
        module = _loaded(str(library.path))
        lengths, out = ends - starts, torch.empty((rows, k), dtype=torch.int32, device=logits.device)
        if rows > SGLANG_DECODE:

            def call() -> None:
                module.topk_transform_ragged(logits, lengths, None, starts, out)

            return self._attached(call, logits, out, lengths)
        schedule = torch.zeros((rows + 1, 2), dtype=torch.int32, device=logits.device)
        module.topk_plan(lengths, schedule, -1)

        def call_decode() -> None:
            module.topk_transform_paged(logits, lengths, None, out, 1, schedule, None)

        return self._attached(call_decode, logits, out, lengths, schedule)

    def _attached(self, call: Callable[[], None], logits: Any, out: Any, *keep: Any) -> Attached:
        return Attached(call, lambda: (lowest_of_ties(logits, out),), keep=keep, outputs=(out,), count=1)


@cache
def _loaded(path: str) -> Any:
    if not libraries.package_dirs("tvm_ffi"):
        raise UserError("SGLang's object is loaded by TVM-FFI: pip install apache-tvm-ffi.")
    return import_module("tvm_ffi").load_module(path)
