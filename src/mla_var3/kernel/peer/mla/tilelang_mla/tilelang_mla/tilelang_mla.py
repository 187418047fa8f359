"""TileLang's public MLA example, for decode in fp16.

It is examples/deepseek_mla/example_mla_decode_paged.py of tile-ai/tilelang, a program and not a library: one query
token, no mask, shapes compiled in, latent and rope columns in caches of their own (copied in `plan()`), and no
log-sum-exp. Only `out` is the peer's; the log-sum-exp shown beside it is the oracle's, computed when somebody reads it.
It takes part in fp16 cells, without splits.
"""

from __future__ import annotations

import inspect
from importlib import util
from typing import Any

from mla_var3.device import Requirement
from mla_var3.errors import UserError
from mla_var3.kernel.peer.lib import find
from mla_var3.kernel.peer.lib.find import Library
from mla_var3.kernel.peer.lib.kernel import LATENT, ROPE, Attached, PeerDecodePlan, takes_decode
from mla_var3.problem import MlaProblem
from mla_var3.runtime.types import Verdict

_TILE = 64  # heads and tokens of a tile, as the example's own main has them


def _takes(problem: MlaProblem) -> Verdict:
    if problem.s != 1 or problem.h % _TILE or problem.page_size % _TILE:
        return Verdict.no(
            f"peer/tilelang_mla takes one query token, heads and pages in multiples of {_TILE}; the problem has "
            f"s = {problem.s}, h = {problem.h}, pages of {problem.page_size}"
        )
    return takes_decode("tilelang_mla")(problem)


class TilelangMlaPlan(PeerDecodePlan):
    """Plan of the example's kernel."""

    peer = "tilelang_mla"
    requires = Requirement(archs=("sm_90a",), dtypes=("fp16",), problem=_takes)
    allocates = True
    input_options = {"poison": False}  # noqa: RUF012

    def attach(self, library: Library, *inputs: Any) -> Attached:
        q, kv_cache, page_table, seq_lens = inputs
        b, _, h, _ = q.shape
        pages, page = kv_cache.shape[:2]
        if page_table.shape[1] * b != pages:
            raise UserError(
                "peer/tilelang_mla wants a page table that names all pages of the cache: plan with such a one."
            )
        make = _example(library).mla_decode_tilelang
        if "softmax_scale" not in inspect.signature(getattr(make, "func", make)).parameters:
            raise UserError("peer/tilelang_mla wants an example whose function takes softmax_scale: use a newer one.")
        sizes = (b, h, 1, pages // b * page, LATENT, ROPE, _TILE, _TILE, 1, page)
        kernel = make(*sizes, softmax_scale=self.problem.scale)
        tokens = kv_cache.view(pages * page, 1, LATENT + ROPE)
        rows = q[:, 0]
        views = (rows[..., :LATENT], rows[..., LATENT:], tokens[..., :LATENT], tokens[..., LATENT:])
        split = [x.contiguous() for x in views]
        partial = (q.new_empty((b, h, 1)), q.new_empty((b, h, 1, LATENT)))
        last = [q.new_empty((b, h, LATENT))]

        def call() -> None:
            last[0] = kernel(*split, page_table, seq_lens, *partial)

        def read() -> tuple[Any, ...]:
            return last[0].unsqueeze(1), self.reference_fn(*inputs)[1].float()

        return Attached(call, read, keep=(split, partial), made=last)


def _example(library: Library) -> Any:
    spec = util.spec_from_file_location(f"{find.FETCHED}_tilelang_example", library.path)
    if spec is None or spec.loader is None:
        raise UserError(f"{library.path} is not a Python file.")
    module = util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
