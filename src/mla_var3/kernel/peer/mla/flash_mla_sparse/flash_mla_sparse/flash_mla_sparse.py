"""FlashMLA's sparse decode over packed FP8 caches of layouts v32 and v4.

    plan():  heads padded to 64 or 128, indices as the library wants them, and the schedule of the splits, by the
             library's small kernel over the lengths: once a step of a model
    call:    gather, dequantise and attend, split over the indices → combine, both of the library

Hopper only, pages of any size. Called through the installed `flash_mla`, which allocates in every call. What is
prepared in `plan()` is not timed, as an engine has its tensors so before the call:

    heads     the kernels have 64 and 128. q and the sinks of fewer heads are copied in front of zeros; out and lse are
              slices. The work of the heads that are padded is part of the call
    indices   -1 for those that name no token, as the library reads at any other; -1 behind them up to a multiple of 64,
              its tile. In layout v32, which has no lengths there, -1 from a request's length on. They are copied only
              where one of these changes them

Scales of v32 are rounded to bf16, so that those which are no powers of two give another result: that case is left out.
"""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

from mla_var3.catalogue import libraries
from mla_var3.catalogue.libraries import Library
from mla_var3.device import Requirement
from mla_var3.errors import UserError, Verdict
from mla_var3.kernel.peer.prims.kernel import Attached, natural_lse
from mla_var3.kernel.peer.prims.sparse import PeerSparsePlan, names_token
from mla_var3.packed_cache import VALUES
from mla_var3.workload import decode, sparse_decode

if TYPE_CHECKING:
    from collections.abc import Mapping

    from mla_var3.workload.sparse_decode import SparseProblem

#: Heads that the library has kernels for, and its tile of indices.
HEADS, TILE_N = (64, 128), 64


def takes(problem: SparseProblem) -> Verdict:
    if problem.layout not in ("v32", "v4"):
        return Verdict.no(f"peer/flash_mla_sparse takes layouts v32 and v4; the problem has {problem.layout}")
    if problem.h > HEADS[-1]:
        return Verdict.no(f"peer/flash_mla_sparse takes up to {HEADS[-1]} heads; the problem has {problem.h}")
    if problem.extra and problem.layout == "v32":
        return Verdict.no("peer/flash_mla_sparse takes an extra cache in layout v4 only; the problem has one in v32")
    reason = libraries.absent("flash_mla_sparse")
    return Verdict.yes() if reason is None else Verdict.no(reason)


class FlashMlaSparsePlan(PeerSparsePlan):
    """Plan of `flash_mla_with_kvcache` with indices into an FP8 cache."""

    peer = "flash_mla_sparse"
    requires = Requirement(archs=("sm_90a",), dtypes=("bf16",), problem=takes)
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
        """(b, s, a multiple of 64): the module's docstring says how they differ from those given, if they do."""
        import torch

        indices = given[f"{prefix}indices"]
        made = indices.where(names_token(given, prefix, counted=self.problem.layout == "v32"), -1)
        if behind := -indices.shape[-1] % TILE_N:
            return torch.nn.functional.pad(made, (0, behind), value=-1)
        return indices if torch.equal(made, indices) else made
