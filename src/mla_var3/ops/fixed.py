"""The fixed-split mode: the bits of a request do not depend on what else is in the batch.

A free cut follows the batch: how many parts a request is cut into depends on how many others want the chip, and sums
in another order have other bits. Versions with a knob num_splits cut each request into that *number* of parts, by its
own length alone, so a fixed number would keep the bits too; but a request of 4,096 tokens would be cut as often as one
of 131,072, and write as many fp32 partial results. Here the cut is by a number n of *tokens*:

    short   requests of up to n tokens are left whole: a version with num_splits = 1, whose blocks do whole requests
    spread  a longer request becomes runs of 2n tokens, each a request of its own: its pages, its query rows
    attend  a version with num_splits = 2 cuts each run in two, and leaves its partial results in fp32
    join    the halves of a request's runs in their order, weighted by their log-sum-exp

Where the page table is no wider than n tokens only `short` runs, on the caller's tensors. With a mask each query token
becomes a request as well, because a run that is not the last has no causal edge, and all of them take the other three
steps. Which versions run follows from the problem class and n, by the dispatcher's table, among those that can.

What it costs: runs are never cut further to fill a chip, so few long requests run on few blocks; and every run has
query rows and partial results, whether it has keys or not, so a page table much wider than the requests takes time and
memory. `mla-var3 sweep experiment=fixed_split` measures it.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mla_var3.device import Device, Requirement
from mla_var3.errors import UserError, Verdict
from mla_var3.kernel import registry
from mla_var3.kernel.registry import KernelId
from mla_var3.runtime.base import BaseKernel
from mla_var3.runtime.plan import KernelPlan
from mla_var3.runtime.types import Tiling
from mla_var3.toolchain.compiled import CompiledKernel
from mla_var3.workload import decode
from mla_var3.workload.decode import MlaProblem

if TYPE_CHECKING:
    import torch

    from mla_var3.dispatch import Choice

SPLIT_TOKENS = 4096
WHOLE, HALVES = 1, 2  # splits of a short request, and of a run
MOST_ITEMS = 65535  # requests that a grid's last dimension holds
_COPY_BLOCK = 4096  # elements of q that one program of `spread` copies
_PAGE_BLOCK = 64


def _takes(pd: MlaProblem) -> Verdict:
    return Verdict.yes()


@dataclass(frozen=True)
class FixedSplitTiling(Tiling):
    """split_tokens: tokens of a request that is left whole, and of half a run; a multiple of the page."""

    split_tokens: int = SPLIT_TOKENS

    def validate(self, pd: MlaProblem, device: Device | None = None) -> Verdict:
        if self.split_tokens < 1 or self.split_tokens % pd.page_size:
            return Verdict.no(
                f"split_tokens = {self.split_tokens} is not a multiple of the page of {pd.page_size} tokens"
            )
        items = pd.b * (pd.s if by_token(pd) else 1) * runs_of(pd.max_pages * pd.page_size, self.split_tokens)
        if items > MOST_ITEMS:
            return Verdict.no(
                f"{items:,} runs of {2 * self.split_tokens} tokens are over the {MOST_ITEMS:,} of one launch: use a "
                "larger split or a narrower page table"
            )
        return Verdict.yes()


def by_token(pd: MlaProblem) -> bool:
    """Whether each query token becomes a request of its own."""
    return pd.causal and pd.s > 1


def runs_of(tokens: int, split_tokens: int) -> int:
    """Runs of a request of so many tokens, if it has any."""
    return max(1, -(-tokens // (2 * split_tokens)))


def inner_problem(pd: MlaProblem, b: int, t: int) -> MlaProblem:
    """What a version is asked to do: b requests of at most t tokens."""
    changes: dict[str, Any] = {"b": b, "t": t, "lengths": "uniform"}
    if by_token(pd):
        changes |= {"s": 1, "causal": False}
    return pd.replace(**changes)


class FixedSplitPlan(KernelPlan):
    """Plan of the mode for a problem; inputs and outputs as of every decode version."""

    workload = decode.WORKLOAD
    tiling_type = FixedSplitTiling
    requires = Requirement(archs=(), dtypes=("bf16", "fp16"), problem=_takes)

    tiling: FixedSplitTiling

    def default_tiling(self) -> FixedSplitTiling:
        page = self.problem.page_size
        return FixedSplitTiling(-(-SPLIT_TOKENS // page) * page)

    def autotune_configs(self) -> list[Tiling]:
        """One: the cut decides the bits of the results, so it is the caller's to choose."""
        return [self.tiling]

    def supported(self) -> Verdict:
        verdict = super().supported()
        if not verdict:
            return verdict
        try:
            self.inner_kernel()
            self.inner_kernel(HALVES)
        except UserError as error:
            return Verdict.no(str(error))
        return verdict

    # ------------------------------------------------------------ the versions inside
    def inner_kernel(self, splits: int = WHOLE) -> KernelId:
        """The version that computes short requests (WHOLE) or runs (HALVES), by the problem class and the cut alone;
        raises `Unsupported` when there is none."""
        device = self.device or Device.detect()
        if device is None:
            raise UserError("there is no GPU here to pick a version for: give the plan a device.")
        return inner_choice(self.problem.problem_class(), self.tiling.split_tokens, device, splits).kernel

    def _inner(self, splits: int, b: int, t: int) -> KernelPlan:
        plan_type = registry.get_plan(self.inner_kernel(splits))
        plan = with_splits(plan_type, inner_problem(self.problem, b, t), self.device, splits)
        plan.compiled = self.compiled.setdefault(plan_type.__module__, {})
        plan.late_tensors = self.late_tensors
        return plan

    # ------------------------------------------------------------ kernels
    def plan(self, *inputs: Any) -> BaseKernel:
        import torch

        self.require()
        pd, tokens = self.problem, self.tiling.split_tokens
        q, kv_cache, page_table, seq_lens = inputs
        b, width = page_table.shape
        longest, alone = width * pd.page_size, by_token(pd)
        if longest <= tokens and not alone:
            whole = self._inner(WHOLE, b, longest).plan(*inputs)
            _refuse_partials(whole, pd.k)
            return FixedSplitKernel(self, inputs, tuple(whole.output_tensors), short=whole)
        short_lens = torch.empty_like(seq_lens)
        short = None
        if alone:
            out = q.new_empty((b, pd.s, pd.h, pd.k))
            lse = q.new_empty((b, pd.h, pd.s), dtype=torch.float32)
        else:
            short = self._inner(WHOLE, b, longest).plan(q, kv_cache, page_table, short_lens)
            _refuse_partials(short, pd.k)
            out, lse = short.output_tensors
        items = runs_of(longest, tokens) * b * (pd.s if alone else 1)
        run_q = q.new_empty((items, 1 if alone else pd.s, *q.shape[2:]))
        run_table = page_table.new_empty((items, 2 * tokens // pd.page_size))
        run_lens = page_table.new_empty((items,))
        both: Any = self._inner(HALVES, items, 2 * tokens).plan(run_q, kv_cache, run_table, run_lens)
        runs = (run_q, run_table, run_lens, short_lens)
        return FixedSplitKernel(self, inputs, (out, lse), short=short, attend=both.stages[0], runs=runs)

    def plan_empty(self) -> BaseKernel:
        self.require()
        pd, tokens = self.problem, self.tiling.split_tokens
        short = None if by_token(pd) else self._inner(WHOLE, pd.b, tokens).plan_empty()
        both: Any = self._inner(HALVES, pd.b, 2 * tokens).plan_empty()
        return FixedSplitKernel(self, (), (), short=short, attend=both)  # both stages are loaded when it is planned


class FixedSplitKernel(BaseKernel):
    """spread → short → attend → join, or short alone where it holds every request.

    short: the kernel of whole requests, on the outputs; None under a mask. attend: writes both halves of every run.
    runs: query rows, page table and lengths of the runs, and the lengths of short requests.
    """

    def __init__(
        self,
        plan: FixedSplitPlan,
        inputs: Sequence[Any],
        outputs: Sequence[Any],
        *,
        short: BaseKernel | None = None,
        attend: BaseKernel | None = None,
        runs: Sequence[Any] = (),
    ) -> None:
        inner = [kernel for kernel in (short, attend) if kernel is not None]
        kept = [*runs, *(attend.output_tensors if attend is not None else ())]
        super().__init__(
            "fixed_split",
            input_tensors=inputs,
            output_tensors=outputs,
            workspace_tensors=[*kept, *(x for kernel in inner for x in kernel.workspace_tensors)],
            tiling=plan.tiling,
            plan=plan,
        )
        self.inner = inner
        self.short = short
        self.attend = attend
        self.runs = tuple(runs)

    @property
    def follows_tensors(self) -> bool:
        """Whether it reads the addresses of its tensors when it launches."""
        from mla_var3.ops.engine import follows_tensors

        return all(follows_tensors(kernel) for kernel in self.inner)

    def launch(self) -> None:
        if self.attend is None:
            assert self.short is not None
            self.short.launch()
            return
        from mla_var3.kernel.triton.prims.numerics import interpreted
        from mla_var3.ops.fixed_kernels import join, spread

        assert isinstance(self.plan, FixedSplitPlan)
        pd = self.plan.problem
        q, _, page_table, seq_lens = self.input_tensors
        run_q, run_table, run_lens, short_lens = self.runs
        b, width = page_table.shape
        items, run_pages = run_table.shape
        row = run_q[0].numel()
        tokens = pd.s if by_token(pd) else 1
        # Under a mask no request is short, not even an empty one: its tokens are joined from runs without keys.
        common = {"TOKENS": tokens, "SHORT": self.plan.tiling.split_tokens if self.short is not None else -1}
        spread[(items, -(-row // _COPY_BLOCK))](
            q, page_table, seq_lens, run_q, run_table, run_lens, short_lens, width, b, run_pages,
            ROW=row, PAGE=pd.page_size, BLOCK=_COPY_BLOCK, PAGES=_PAGE_BLOCK, **common,
        )  # fmt: skip
        if self.short is not None:
            self.short.launch()
        self.attend.launch()
        out, lse = self.output_tensors
        join[(b * pd.s, pd.h)](
            *self.attend.output_tensors, seq_lens, out, lse, items // (tokens * b), b,
            S=pd.s, H=pd.h, GROUP=pd.group, K=pd.k, COLUMNS=1 << (pd.k - 1).bit_length(),
            DTYPE=_triton_type(pd.dtype), INTERPRET=interpreted(join), **common,
        )  # fmt: skip

    def compile(self, out_dir: Path | None, device: Device, keep: Sequence[str] = ()) -> CompiledKernel:
        """The versions inside; the two small kernels are compiled by their first launch."""
        compiled = [k.compile(None if out_dir is None else out_dir / k.name, device, keep) for k in self.inner]
        return CompiledKernel.of_stages(self.name, device.arch, compiled)


# ---------------------------------------------------------------- which version
@functools.lru_cache(maxsize=1024)
def inner_choice(problem_class: Any, split_tokens: int, device: Device, splits: int) -> Choice:
    """The version for whole requests or for halves of runs: by the problem class and the device, never by a batch.

    It is asked for as many pieces of split_tokens as fill a chip without a cut.
    """
    from mla_var3.dispatch import choose

    fields = {name: getattr(problem_class, name) for name in problem_class.__dataclass_fields__}
    problem = inner_problem(MlaProblem(b=1, t=split_tokens, **fields), max(1, device.num_sms), split_tokens)
    return choose(problem, device, accepts=leaves_whole if splits == WHOLE else leaves_halves)


def _with_knob(plan_type: type[KernelPlan], plan: KernelPlan, splits: int) -> tuple[Verdict, Any]:
    """Whether a version takes a number of splits at all, and the kernel without tensors that it then makes."""
    if not plan.deterministic:
        return Verdict.no("it does not give the same bits twice"), None
    if "num_splits" not in plan.tiling.to_record():
        return Verdict.no("it has no knob num_splits, so its cut is not by a request's own length"), None
    made = with_splits(plan_type, plan.problem, plan.device, splits)
    verdict = made.feasible()
    return verdict, made.plan_empty() if verdict else None


def leaves_whole(plan_type: type[KernelPlan], plan: KernelPlan) -> Verdict:
    """Whether a version computes a request in one piece when it is told to."""
    verdict, kernel = _with_knob(plan_type, plan, WHOLE)
    if verdict and hasattr(kernel, "stages"):
        return Verdict.no(f"with num_splits = 1 it has {len(kernel.stages)} stages, between which results may meet")
    return verdict


def leaves_halves(plan_type: type[KernelPlan], plan: KernelPlan) -> Verdict:
    """Whether a version's first stage leaves the partial results of two splits in the form that `join` reads: fp32
    outputs (2, b, h_kv, rows, k) and LSEs (2, b, h_kv, rows), made by the plan's `partials(q, splits)`."""
    if not hasattr(plan, "partials"):
        return Verdict.no("its partial results are its own matter: the plan has no `partials(q, splits)`")
    verdict, kernel = _with_knob(plan_type, plan, HALVES)
    if verdict and len(getattr(kernel, "stages", ())) != 2:
        return Verdict.no("with num_splits = 2 it has no two stages with partial results between them")
    return _as_described(plan) if verdict else verdict


def _as_described(plan: Any) -> Verdict:
    """Whether a version's partial results have the form that `join` reads."""
    import torch

    pd = plan.problem
    q = torch.empty((1, pd.s, pd.h, pd.k + pd.p), dtype=pd.torch_dtype, device="meta")
    wanted = [(HALVES, 1, pd.h_kv, pd.rows, pd.k), (HALVES, 1, pd.h_kv, pd.rows)]
    parts = plan.partials(q, HALVES)
    if [tuple(x.shape) for x in parts] == wanted and all(x.dtype == torch.float32 for x in parts):
        return Verdict.yes()
    found = ", ".join(f"{str(x.dtype).removeprefix('torch.')} {tuple(x.shape)}" for x in parts)
    return Verdict.no(f"its partial results are of a form of its own ({found})")


def with_splits(plan_type: type[KernelPlan], problem: MlaProblem, device: Device | None, splits: int) -> KernelPlan:
    """A version's plan with a number of splits and the other knobs at their default for the problem class."""
    plan = plan_type(problem, None, device)
    tiling = plan.tiling.from_record({**plan.tiling.to_record(), "num_splits": splits})
    return plan_type(problem, tiling, device)


def _refuse_partials(kernel: BaseKernel, columns: int) -> None:
    """A kernel with room for a partial row of the output could put a request together from pieces that depend on the
    batch. columns: of a row."""
    if any(x.is_floating_point() and x.numel() >= columns for x in kernel.workspace_tensors):
        raise UserError(
            f"{kernel.name} keeps partial results although num_splits = 1, so a fixed cut cannot rest on it; "
            "report this version."
        )


def _triton_type(dtype: str) -> torch.dtype:
    import triton.language as tl

    return {"bf16": tl.bfloat16, "fp16": tl.float16}[dtype]
