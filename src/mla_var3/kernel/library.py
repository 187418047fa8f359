"""A library's call as a kernel, and what the plans of peers (`kernel/peer`) share.

Two things differ from a kernel of our own, and each is declared on the plan's class:

allocates       the library makes its outputs or workspaces inside the call, from torch's caching allocator (a graph's
                private pool under capture). Our own kernels never do.
plans_lengths   the schedule of the split depends on the lengths, and is made in `plan()` (or `bind`), as the library
                wants it; lengths that change on the device under a bound kernel need a new one. The oracle's case
                "in_place" is therefore left out (`leaves_out`).

What a library returns may have another form: log-sum-exps to base 2, -inf for a row without keys, heads and tokens in
another order. A call does no more than the library's own work; `output_tensors` brings the results into the house's
form when somebody reads them, so that the conversion is never part of a measured time.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from mla_var3.catalogue import libraries
from mla_var3.catalogue.libraries import Library
from mla_var3.errors import UserError, Verdict
from mla_var3.packed_cache import Layout, unpack
from mla_var3.runtime.base import BaseKernel, Outputs
from mla_var3.runtime.plan import KernelPlan
from mla_var3.runtime.types import Tiling
from mla_var3.toolchain.compiled import CompiledKernel
from mla_var3.toolchain.digest import Code
from mla_var3.workload import decode, prefill, sparse_decode

if TYPE_CHECKING:
    from mla_var3.device import Device
    from mla_var3.workload import Problem
    from mla_var3.workload.decode import MlaProblem
    from mla_var3.workload.rope import RopeProblem
    from mla_var3.workload.sparse_decode import SparseProblem

#: Latent and rope columns that the peers of the absorbed form are compiled for.
LATENT, ROPE = 512, 64
LN2 = 0.6931471805599453
#: Columns that are converted at a time: in float64 on the way.
_CHUNK = 1 << 26
#: Shapes that a function is compiled for before torch gives up: a sweep has many cells.
MOST_SHAPES = 1024


@dataclass(frozen=True)
class NoKnobs(Tiling):
    """The library chooses."""

    def validate(self, pd: MlaProblem, device: Device | None = None) -> Verdict:
        return Verdict.yes()


@dataclass
class Attached:
    """A library's call on given tensors.

    call: launches on torch's current stream. read: the outputs of the last call, `count` of them; of attention
    (out (b, s, h, columns), lse (b, h, s)). workspaces: tensors that only the call uses. keep: what must stay
    alive beside them. outputs: what was made here for the call to write. made: a list in which the call leaves what the
    library returned. with_schedule: the call with a schedule of its own, where calls share one.
    """

    call: Callable[[], None]
    read: Callable[[], tuple[Any, ...]]
    workspaces: tuple[Any, ...] = ()
    keep: tuple[Any, ...] = ()
    outputs: tuple[Any, ...] = ()
    made: list[Any] | None = None
    with_schedule: Callable[[], None] | None = None
    count: int = 2


class PeerKernel(BaseKernel):
    """A library's call, bound to tensors. `library` says which build is behind it."""

    comes_compiled = True

    def __init__(self, name: str, attached: Attached | None, library: Library | None = None, **options: Any) -> None:
        self.attached = attached
        self.library = library
        self._drops = False
        self._outputs: Sequence[Any] = ()
        super().__init__(name, **options)
        if attached is not None:
            self._outputs = Outputs(attached.read, attached.count)
            self.workspace_tensors = attached.workspaces

    def code(self, device: Device) -> Code | None:
        return Code(device.arch, binary=self.library.fingerprint()) if self.library is not None else None

    @property
    def output_tensors(self) -> Any:
        """The outputs, converted at each reading; empty without tensors."""
        return self._outputs

    @output_tensors.setter
    def output_tensors(self, value: Any) -> None:
        self._outputs = value

    def launch(self) -> None:
        assert self.attached is not None
        self._run(self.attached.call)

    def _run(self, call: Callable[[], None]) -> None:
        assert self.attached is not None
        call()
        if self._drops and self.attached.made is not None:
            self.attached.made[:] = [None] * len(self.attached.made)

    @property
    def with_schedule(self) -> Callable[[], None] | None:
        made = None if self.attached is None else self.attached.with_schedule
        return None if made is None else lambda: self._run(made)

    def written_tensors(self) -> tuple[Any, ...]:
        return () if self.attached is None else (*self.attached.outputs, *self.workspace_tensors)

    def keep_results(self, keep: bool) -> None:
        """Whether what the library returns stays alive behind a call. With keep=False it is freed at once, so that the
        next call gets the same memory, and outputs that the library made cannot be read."""
        self._drops = not keep

    def compile(self, out_dir: Path | None, device: Device, keep: Sequence[str] = ()) -> CompiledKernel:
        raise UserError(f"{self.name} is a library's binary: there is nothing of it to compile here.")


class PeerMixin:
    """What the plans of all peers have: `peer`, the name of the library; `attach`; what is declared of the library's
    call (`allocates`, `plans_lengths`, `leaves_out`, `input_options`); and a tiling without knobs."""

    peer: ClassVar[str]
    allocates: ClassVar[bool] = False
    plans_lengths: ClassVar[bool] = True
    #: Cases of the check that are left out: what the interface rules out, and what only our own kernels promise.
    leaves_out: ClassVar[tuple[str, ...]] = ("in_place", *decode.PROMISED)
    #: Options of the workload's `make_inputs` that the library needs.
    input_options: ClassVar[dict[str, Any]] = {}

    def default_tiling(self) -> NoKnobs:
        return NoKnobs()

    def autotune_configs(self) -> list[Tiling]:
        return [NoKnobs()]

    @abstractmethod
    def attach(self, library: Library, *inputs: Any) -> Attached:
        """Plans the library's schedule for these tensors and returns its call."""

    def plan(self, *inputs: Any) -> PeerKernel:
        """Raises `Unsupported` where the library is absent."""
        library = libraries.require(self.peer)
        attached = self.attach(library, *inputs)
        return PeerKernel(self.peer, attached, library, input_tensors=inputs, tiling=NoKnobs(), plan=self)

    def plan_empty(self) -> PeerKernel:
        return PeerKernel(self.peer, None, libraries.find(self.peer), tiling=NoKnobs(), plan=self)


class PeerDecodePlan(PeerMixin, KernelPlan):
    """A peer of the absorbed form: inputs (q, kv_cache, page_table, seq_lens), outputs (out, lse)."""

    workload = decode.WORKLOAD
    tiling_type = NoKnobs


class PeerPrefillPlan(PeerMixin, KernelPlan):
    """A peer of the decompressed form: inputs (q, k, v, cu_seqlens_q, cu_seqlens_k), outputs (out, lse).

    The longest request is asked of the device when a call is planned, as a server knows it on the host.
    """

    workload = prefill.WORKLOAD
    tiling_type = NoKnobs
    leaves_out = ("in_place", *prefill.PROMISED)


class PeerSparsePlan(PeerMixin, KernelPlan):
    """A peer of sparse decode: inputs of `workload.sparse_decode`, outputs (out, lse)."""

    workload = sparse_decode.WORKLOAD
    tiling_type = NoKnobs


# ---------------------------------------------------------------- what a library takes
def is_here(peer: str) -> Callable[[Problem], Verdict]:
    """A predicate: the library is here."""

    def verdict(problem: Problem) -> Verdict:
        reason = libraries.absent(peer)
        return Verdict.yes() if reason is None else Verdict.no(reason)

    return verdict


def has_widths(peer: str, problem: MlaProblem | RopeProblem) -> Verdict:
    """Whether a problem has the columns that peers are compiled for."""
    if (problem.k, problem.p) != (LATENT, ROPE):
        return Verdict.no(
            f"peer/{peer} has {LATENT} + {ROPE} columns a token; the problem has {problem.k} + {problem.p}"
        )
    return Verdict.yes()


def takes_decode(peer: str, *, page: int | None = None) -> Callable[[MlaProblem], Verdict]:
    """A predicate: the problem is one that the peer computes, and the library is here. page: the only page size."""

    def verdict(problem: MlaProblem) -> Verdict:
        widths = has_widths(peer, problem)
        if not widths:
            return widths
        if problem.h_kv != 1:
            return Verdict.no(f"peer/{peer} takes one latent cache; the problem has h_kv = {problem.h_kv}")
        if page is not None and problem.page_size != page:
            return Verdict.no(f"peer/{peer} takes pages of {page} tokens; the problem has {problem.page_size}")
        return is_here(peer)(problem)

    return verdict


def takes_bf16(peer: str) -> Callable[[SparseProblem], Verdict]:
    """`takes` of a peer that attends to one cache in bf16, converted where it is v32, and knows no sinks."""

    def takes(problem: SparseProblem) -> Verdict:
        if problem.layout not in ("v32", "bf16"):
            return Verdict.no(f"peer/{peer} takes layout bf16, and v32 converted; the problem has {problem.layout}")
        if problem.sink:
            return Verdict.no(f"peer/{peer} takes no attention sinks in float32; the problem has sinks")
        if problem.extra:
            return Verdict.no(f"peer/{peer} takes one cache; the problem has an extra one")
        return is_here(peer)(problem)

    return takes


# ---------------------------------------------------------------- tensors and extensions
def natural_lse(lse: Any, *, base2: bool = False) -> Any:
    """A float32 log-sum-exp with base e, and +inf for a row without keys (libraries write -inf)."""
    if base2:
        lse = lse * LN2
    return lse.masked_fill(lse == float("-inf"), float("inf"))


def prefill_lse(lse: Any, *, base2: bool = False) -> Any:
    """A float32 log-sum-exp with base e, and -inf for a row without keys (some libraries write +inf)."""
    if base2:
        lse = lse * LN2
    return lse.masked_fill(lse == float("inf"), float("-inf"))


def longest(cu_seqlens: Any) -> int:
    """Tokens of the longest request. Waits for the device."""
    return int(cu_seqlens.diff().max())


def value_columns(dk: int, d: int) -> int:
    """Columns of values that FlashAttention and FlashInfer take with keys of dk: 128 beside 192, else as many as
    keys."""
    return d if (dk, d) == (192, 128) else dk


def padded_values(v: Any, columns: int) -> Any:
    """Values with columns of zeros behind theirs, as many as `columns` in all; themselves where they are as wide."""
    import torch

    return v if v.shape[-1] == columns else torch.nn.functional.pad(v, (0, columns - v.shape[-1]))


def page_indices(page_table: Any, seq_lens: Any, page: int) -> tuple[Any, Any, Any]:
    """Compressed-row form of a page table, on the CPU: offsets (b + 1), page ids (all pages in use), lengths (b).

    All int32. Entries past a request's last page, which may be garbage, are left out. Waits for the device.
    """
    import torch

    table, lens = page_table.cpu(), seq_lens.cpu()
    counts = (lens + page - 1) // page
    used = torch.arange(table.shape[1]) < counts.unsqueeze(1)
    offsets = torch.zeros(len(lens) + 1, dtype=torch.int32)
    offsets[1:] = counts.cumsum(0)
    return offsets, table[used].contiguous(), lens


def load_extension(library: Library, namespace: str) -> Any:
    """`torch.ops.<namespace>` of a shared object that registers its functions with torch; nothing else is imported."""
    import torch

    try:
        torch.ops.load_library(str(library.path))
    except OSError as error:
        raise UserError(
            f"{library.path} does not load into torch {torch.__version__}: {error}; "
            "it must be the build for this release of torch and CUDA."
        ) from error
    return getattr(torch.ops, namespace)


def named_arguments(op: Any, values: dict[str, Any]) -> list[Any]:
    """The positional arguments of a registered function, by the names of its schema.

    Arguments that are not given take their default, or None where they are optional. Releases add, remove and reorder
    arguments; a name that the schema lacks, or a needed one that is not given, is a `UserError`, not a wrong call.
    """
    import torch

    rest, arguments = dict(values), []
    for argument in op._schema.arguments:
        if argument.name in rest:
            arguments.append(rest.pop(argument.name))
        elif argument.has_default_value():
            arguments.append(argument.default_value)
        elif isinstance(argument.type, torch.OptionalType):
            arguments.append(None)
        else:
            raise UserError(f"{op} of this release wants {argument.name!r}, which this wrapper does not know.")
    if rest:
        raise UserError(f"{op} of this release has no {', '.join(rest)}: the wrapper is for another release.")
    return arguments


def names_token(given: Mapping[str, Any], prefix: str = "", *, counted: bool = True) -> Any:
    """(b, s, topk) bool: whether an index names a token of its cache and, if counted, stands before the request's
    length. given: inputs by their names. prefix: "extra_" for those of the extra cache."""
    import torch

    indices, cache = given[f"{prefix}indices"], given[f"{prefix}cache"]
    names = (indices >= 0) & (indices < cache.shape[0] * cache.shape[1])
    lengths = given.get(f"{prefix}lengths")
    if counted and lengths is not None:
        names &= torch.arange(indices.shape[-1], device=indices.device) < lengths.view(-1, 1, 1)
    return names


def single_pages(given: Mapping[str, Any]) -> tuple[Any, Any]:
    """The indices as page tables with pages of size 1, of b · s requests of one query token: (b · s, topk), those that
    name a token first and in their order, 0 behind them; and the number of these, (b · s,) int32."""
    import torch

    indices, names = given["indices"], names_token(given)
    first = names.to(torch.int8).argsort(dim=-1, descending=True, stable=True)
    lens = names.sum(-1)
    counts = torch.arange(indices.shape[-1], device=indices.device) < lens.unsqueeze(-1)
    table = indices.gather(-1, first).where(counts, 0)
    return table.flatten(0, 1), lens.flatten().to(torch.int32)


def in_bf16(layout: Layout, cache: Any) -> Any:
    """(pages, page, columns), contiguous: the cache itself where it is so."""
    import torch

    if layout.name == "bf16":
        return cache.contiguous()
    pages, page, _ = cache.shape
    made = cache.new_empty((pages, page, layout.columns), dtype=torch.bfloat16)
    step = max(1, _CHUNK // (page * layout.columns))
    for begin in range(0, pages, step):
        made[begin : begin + step] = unpack(layout, cache[begin : begin + step])
    return made


@cache
def compiled(fn: Callable[..., Any], tuned: bool = True) -> Callable[..., Any]:
    """The function as torch compiles it, with its tuning on unless products are to stay cuBLAS's; a graph is captured
    by who measures, not by torch."""
    import torch

    config: Any = torch._dynamo.config
    config.recompile_limit = config.accumulated_recompile_limit = MOST_SHAPES
    # Rounds where the function says so; else the norm is of a sum that was not rounded, another result.
    options = {"max_autotune": tuned, "coordinate_descent_tuning": tuned, "emulate_precision_casts": True}
    made: Callable[..., Any] = torch.compile(fn, fullgraph=True, dynamic=False, options=options)
    return made
