"""DeepGEMM's logits of the lightning indexer, as installed (`deep_gemm`)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mla_var3.catalogue.libraries import Library
from mla_var3.device import Requirement
from mla_var3.errors import Verdict
from mla_var3.kernel.library import Attached, NoKnobs, PeerMixin, is_here
from mla_var3.runtime.plan import KernelPlan
from mla_var3.workload import indexer_logits
from mla_var3.workload.indexer_logits import PAGE

if TYPE_CHECKING:
    from mla_var3.workload.indexer_logits import IndexerLogitsProblem

#: Heads that the library has kernels for on Hopper, and query tokens of a request that a call takes at most.
HEADS, MOST = (32, 64), 2
#: What an output that is written in part holds where nothing is written.
NOBODYS = -8192.0


def takes_logits(problem: IndexerLogitsProblem) -> Verdict:
    if problem.heads > HEADS[-1]:
        return Verdict.no(f"peer/deep_gemm takes up to {HEADS[-1]} heads; the problem has {problem.heads}")
    return is_here("deep_gemm")(problem)


class DeepGemmPlan(PeerMixin, KernelPlan):
    """DeepGEMM's `fp8_mqa_logits` and `fp8_paged_mqa_logits` for Hopper.

        plan():  heads padded to 32 or 64, ranges cut to the keys, and in the paged form the schedule, by the library's
                 small kernel over the lengths: once a step of a model
        call:    one kernel; of a request with more than two query tokens one for every two

    It compiles a kernel with nvcc when it first meets a number of heads, a dtype and a form, and keeps it. Called
    through the installed `deep_gemm`, which allocates the logits in every call and writes whole KV tiles of them, past
    the end of a query token's range too; what is out of range is left out when results are read. Cases with NaN are
    left out, as it returns NaN where ours return -inf.

    Its extension crashes at its first call where another libstdc++ than the compiler's was loaded before it: preload
    the system's (`LD_PRELOAD`), as the `activate` of scripts/fetch_peers.py does.
    """

    peer = "deep_gemm"
    workload = indexer_logits.WORKLOAD
    tiling_type = NoKnobs
    requires = Requirement(archs=("sm_90a",), dtypes=("fp32", "bf16"), problem=takes_logits)
    allocates = True
    leaves_out = ("in_place", "odd", "shifted")

    def attach(self, library: Library, *inputs: Any) -> Attached:
        import deep_gemm
        import torch
        from torch.nn.functional import pad

        pd = self.problem
        q, weights = inputs[0].view(torch.float8_e4m3fn), inputs[2 if pd.table else 3]
        missing = next(heads for heads in HEADS if heads >= pd.heads) - pd.heads
        if missing:
            q = pad(inputs[0], (0, 0, 0, missing)).view(torch.float8_e4m3fn)
            weights = pad(weights, (0, missing))
        last: list[Any] = []
        dtype = {"clean_logits": False, "logits_dtype": pd.torch_dtype}
        if not pd.table:
            _, keys, scales, _, starts, ends = inputs
            low = starts.clamp(0, len(keys))
            high = ends.clamp(0, len(keys)).maximum(low)
            cached = keys.view(torch.float8_e4m3fn), scales

            def call() -> None:
                last[:] = [deep_gemm.fp8_fp4_mqa_logits((q, None), cached, weights, low, high, **dtype)]

            def read() -> tuple[Any, ...]:
                return (_within(last[0], low, high),)

            call()
            return Attached(call, read, keep=(q, cached, weights, low, high), made=last, count=1)
        _, cache, _, ends, table = inputs
        b, s = ends.shape
        ends = ends.clamp(0, table.shape[1] * PAGE)
        # Of every two query tokens a call of its own.
        parts = [slice(first, min(first + MOST, s)) for first in range(0, s, MOST)]
        of_heads = weights.view(b, s, -1)
        given = [
            (q[:, x].contiguous(), of_heads[:, x].flatten(0, 1).contiguous(), ends[:, x].contiguous()) for x in parts
        ]
        pages, sms, columns = cache.unsqueeze(2), deep_gemm.get_num_sms(), table.shape[1] * PAGE

        def schedules() -> list[Any]:
            return [deep_gemm.get_paged_mqa_logits_metadata(lens, PAGE, sms) for _, _, lens in given]

        def attend(of_parts: list[Any]) -> None:
            last[:] = [
                deep_gemm.fp8_fp4_paged_mqa_logits(
                    (codes, None), pages, factors, lens, table, schedule, columns, **dtype
                )
                for (codes, factors, lens), schedule in zip(given, of_parts, strict=True)
            ]

        made = schedules()

        def read_parts() -> tuple[Any, ...]:
            found = torch.cat([x.view(b, -1, columns) for x in last], 1).flatten(0, 1)
            high = ends.flatten()
            return (_within(found, torch.zeros_like(high), high),)

        attend(made)
        return Attached(
            lambda: attend(made),
            read_parts,
            keep=(given, made, pages, table),
            made=last,
            count=1,
            with_schedule=lambda: attend(schedules()),
        )


def _within(logits: Any, low: Any, high: Any) -> Any:
    """Logits (rows, columns) with `NOBODYS` out of each row's range."""
    import torch

    column = torch.arange(logits.shape[1], device=logits.device)
    return logits.masked_fill((column < low[:, None]) | (column >= high[:, None]), NOBODYS)
