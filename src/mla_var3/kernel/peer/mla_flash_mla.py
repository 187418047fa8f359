"""FlashMLA, DeepSeek's decode kernels: dense, as installed (`flash_mla_lib`) and out of a vllm wheel
(`flash_mla_vllm`); sparse (`flash_mla_sparse`); and a layer's decode step with it for attention (`flash_mla_layer`)."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

from mla_var3.catalogue import libraries
from mla_var3.catalogue.libraries import Library
from mla_var3.device import Requirement
from mla_var3.errors import UserError, Verdict
from mla_var3.kernel.layer import LayerKernel, LayerTiling, compose
from mla_var3.kernel.library import (
    LATENT,
    Attached,
    PeerDecodePlan,
    PeerSparsePlan,
    is_here,
    load_extension,
    names_token,
    natural_lse,
    takes_decode,
)
from mla_var3.packed_cache import VALUES
from mla_var3.runtime import KernelPlan, Tiling
from mla_var3.workload import decode, layer, sparse_decode
from mla_var3.workload.layer import LayerProblem

if TYPE_CHECKING:
    from collections.abc import Mapping

    from mla_var3.workload.sparse_decode import SparseProblem


class FlashMlaLibPlan(PeerDecodePlan):
    """FlashMLA, DeepSeek's own dense decode kernel.

        plan():  the schedule of the splits, by the library's small kernel over the lengths: once a step of a model
        call:    split-KV attention → combine, both of the library

    Hopper only, 64-token pages, 64 query rows a tile. Called through the installed `flash_mla`, which allocates in
    every call.
    """

    peer = "flash_mla_lib"
    requires = Requirement(archs=("sm_90a",), dtypes=("bf16", "fp16"), problem=takes_decode("flash_mla_lib", page=64))
    allocates = True

    def attach(self, library: Library, *inputs: Any) -> Attached:
        q, kv_cache, page_table, seq_lens = inputs
        import flash_mla

        s, h = q.shape[1], q.shape[2]
        # The older interface makes the schedule here, the newer one in the first call; both take it back as it came.
        schedule, splits = flash_mla.get_mla_metadata(seq_lens, s * h, 1)
        last: list[Any] = []

        def attend(schedule: Any, splits: Any) -> None:
            last[:] = flash_mla.flash_mla_with_kvcache(
                q,
                kv_cache,
                page_table,
                seq_lens,
                LATENT,
                schedule,
                splits,
                softmax_scale=self.problem.scale,
                causal=self.problem.causal,
            )

        def call() -> None:
            attend(schedule, splits)

        def with_schedule() -> None:
            attend(*flash_mla.get_mla_metadata(seq_lens, s * h, 1))

        call()
        return Attached(
            call,
            lambda: (last[0], natural_lse(last[1])),
            keep=(schedule, splits),
            made=last,
            with_schedule=with_schedule,
        )


class FlashMlaVllmPlan(PeerDecodePlan):
    """FlashMLA as a vllm wheel builds it.

    The dense decode kernel, from the wheel's extension alone, without importing vllm.

        plan():  one call without a schedule makes it (a small kernel over the lengths)
        call:    split-KV attention → combine, both of the library, with that schedule

    The same sources as `flash_mla_lib`, in the build of the wheel, which was seen to be 5 to 27 % slower: a record of
    the one is not a record of the other. Hopper only. The library allocates outputs and partial results in every call.
    """

    peer = "flash_mla_vllm"
    requires = Requirement(archs=("sm_90a",), dtypes=("bf16", "fp16"), problem=takes_decode("flash_mla_vllm", page=64))
    allocates = True

    def attach(self, library: Library, *inputs: Any) -> Attached:
        q, kv_cache, page_table, seq_lens = inputs
        attend = load_extension(library, "_flashmla_C").dense_decode_fwd
        # Positional: the extension registers its functions without argument names. The tenth, an optional tensor that
        # the build of vllm 0.25.1 takes beyond FlashMLA's own nine, stays empty.
        given = (q, kv_cache, LATENT, seq_lens, page_table, self.problem.scale, self.problem.causal)
        out, lse, schedule, splits = attend(*given, None, None, None)
        last = [out, lse]

        def call() -> None:
            last[:] = attend(*given, schedule, splits, None)[:2]

        return Attached(call, lambda: (last[0], natural_lse(last[1])), keep=(schedule, splits), made=last)


#: Heads that the library has kernels for, and its tile of indices.
HEADS, TILE_N = (64, 128), 64


def takes_sparse(problem: SparseProblem) -> Verdict:
    if problem.layout not in ("v32", "v4"):
        return Verdict.no(f"peer/flash_mla_sparse takes layouts v32 and v4; the problem has {problem.layout}")
    if problem.h > HEADS[-1]:
        return Verdict.no(f"peer/flash_mla_sparse takes up to {HEADS[-1]} heads; the problem has {problem.h}")
    if problem.extra and problem.layout == "v32":
        return Verdict.no("peer/flash_mla_sparse takes an extra cache in layout v4 only; the problem has one in v32")
    return is_here("flash_mla_sparse")(problem)


class FlashMlaSparsePlan(PeerSparsePlan):
    """FlashMLA's sparse decode over packed FP8 caches of layouts v32 and v4.

        plan():  heads padded to 64 or 128, indices as the library wants them, and the schedule of the splits, by the
                 library's small kernel over the lengths: once a step of a model
        call:    gather, dequantise and attend, split over the indices → combine, both of the library

    Hopper only, pages of any size. Called through the installed `flash_mla`, which allocates in every call. What is
    prepared in `plan()` is not timed, as an engine has its tensors so before the call:

        heads     the kernels have 64 and 128. q and the sinks of fewer heads are copied in front of zeros; out and lse
                  are slices. The work of the heads that are padded is part of the call
        indices   -1 for those that name no token, as the library reads at any other; -1 behind them up to a multiple of
                  64, its tile. In layout v32, which has no lengths there, -1 from a request's length on. They are
                  copied only where one of these changes them

    q and indices that are strided are given as they are, where none of these copies is made: the library reads strides.

    Scales of v32 are rounded to bf16, so that those which are no powers of two give another result: that case is left
    out.
    """

    peer = "flash_mla_sparse"
    requires = Requirement(archs=("sm_90a",), dtypes=("bf16",), problem=takes_sparse, options=("strided",))
    allocates = True
    leaves_out = ("in_place", "scales", *decode.PROMISED)

    def attach(self, library: Library, *inputs: Any) -> Attached:
        import flash_mla
        from torch.nn.functional import pad

        if "extra_k_cache" not in inspect.signature(flash_mla.flash_mla_with_kvcache).parameters:
            raise UserError(
                f"flash_mla {library.version} has no extra_k_cache: {libraries.FETCH} --help has a newer one."
            )
        given = sparse_decode.named(self.problem, *inputs)
        q, sink, h = given["q"], given.get("sink"), self.problem.h
        missing = next(heads for heads in HEADS if heads >= h) - h
        if missing:
            q = pad(q, (0, 0, 0, missing))
            sink = None if sink is None else pad(sink, (0, missing))
        v4, extra = self.problem.layout == "v4", bool(self.problem.extra)
        arguments = {
            "block_table": None,
            "cache_seqlens": None,
            "head_dim_v": VALUES,
            "softmax_scale": self.problem.scale,
            "is_fp8_kvcache": True,
            "attn_sink": sink,
            "indices": self.indices(given, ""),
            "topk_length": given.get("lengths") if v4 else None,
            "extra_k_cache": given["extra_cache"].unsqueeze(2) if extra else None,
            "extra_indices_in_kvcache": self.indices(given, "extra_") if extra else None,
            "extra_topk_length": given.get("extra_lengths"),
        }
        cache = given["cache"].unsqueeze(2)
        schedule, _ = flash_mla.get_mla_metadata()
        last: list[Any] = []

        def attend(schedule: Any) -> None:
            last[:] = flash_mla.flash_mla_with_kvcache(q, cache, tile_scheduler_metadata=schedule, **arguments)

        def call() -> None:
            attend(schedule)

        def with_schedule() -> None:
            attend(flash_mla.get_mla_metadata()[0])

        call()  # makes the schedule
        return Attached(
            call,
            lambda: (last[0][:, :, :h], natural_lse(last[1][:, :h])),
            keep=(schedule, q, cache, arguments),
            made=last,
            with_schedule=with_schedule,
        )

    def indices(self, given: Mapping[str, Any], prefix: str) -> Any:
        """(b, s, a multiple of 64): the docstring of the class says how they differ from those given, if they do."""
        import torch

        indices = given[f"{prefix}indices"]
        made = indices.where(names_token(given, prefix, counted=self.problem.layout == "v32"), -1)
        if behind := -indices.shape[-1] % TILE_N:
            return torch.nn.functional.pad(made, (0, behind), value=-1)
        return indices if torch.equal(made, indices) else made


def layer_tiling() -> LayerTiling:
    library = libraries.find("flash_mla_layer")
    return LayerTiling(attention=f"peer/{library.peer if library is not None else 'flash_mla_lib'}")


def takes_layer(problem: LayerProblem) -> Verdict:
    here = is_here("flash_mla_layer")(problem)
    return layer_tiling().validate(problem) if here else here


class FlashMlaLayerPlan(KernelPlan):
    """A decode step of a whole layer with FlashMLA for attention: what it takes whose other kernels are ours.

        as cute-dsl/mla_layer, but for the attention: FlashMLA's split-KV kernel and its combine

    The projections are the same calls, the small kernels the same compiled code, so the difference to our layer is
    attention's alone, and what its kernels let run beside them. FlashMLA is the installed package, else the extension
    of a vllm wheel; its schedule of the splits is made when the kernel is planned, as once a step of a model.

    Inputs and outputs of `workload.layer`. The library's schedule depends on the
    lengths, so other lengths need a new plan.
    """

    workload = layer.WORKLOAD
    tiling_type = LayerTiling
    requires = Requirement(archs=("sm_90a",), dtypes=("bf16", "fp16"), problem=takes_layer)
    peer = "flash_mla_layer"
    allocates = True
    leaves_out = ("in_place",)
    parts = (
        "cute-dsl/rmsnorm",
        "cute-dsl/absorb_gemm",
        "cute-dsl/rope_append",
        "peer/flash_mla_lib",
        "peer/flash_mla_vllm",
    )

    def default_tiling(self) -> LayerTiling:
        return layer_tiling()

    def autotune_configs(self) -> list[Tiling]:
        return [layer_tiling()]

    def plan(self, *inputs: Any) -> LayerKernel:
        self.require()
        return compose(self, inputs)

    def plan_empty(self) -> LayerKernel:
        return compose(self)
