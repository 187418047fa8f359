"""TileLang's public MLA example, for decode in fp16 (`tilelang_mla`).

It is examples/deepseek_mla/example_mla_decode_paged.py of tile-ai/tilelang, a program and not a library: one query
token, no mask, and a kernel for one shape of the tensors, which `plan()` compiles with nvcc (seconds; TileLang keeps
them in its cache). Latent and rope columns are caches of their own, so `plan()` copies q and the cache, the latter
filled up to as many pages as the page table has entries. A call computes on those copies: it does not see what is
written into the caller's tensors later.

The number of splits is the caller's to choose. It is one here unless that leaves multiprocessors idle, and at most the
pages of the shortest request: a split without tokens gives NaN. So does a request without tokens, shown as zeros. The
example has no log-sum-exp: the one shown beside `out` is the oracle's, computed when somebody reads it.

TileLang 0.1.14 does not load beside TVM-FFI 0.1.13 or later. Where scripts/fetch_peers.py brought it, it comes with a
TVM-FFI of its own, which must be the first in its process.
"""

from __future__ import annotations

import inspect
import sys
from importlib import import_module, util
from pathlib import Path
from typing import Any

from mla_var3.catalogue import libraries
from mla_var3.catalogue.libraries import Library
from mla_var3.device import Device, Requirement
from mla_var3.errors import UserError, Verdict
from mla_var3.kernel.library import LATENT, ROPE, Attached, PeerDecodePlan, takes_decode
from mla_var3.workload.decode import MlaProblem

#: Heads and tokens of a tile, as the example's own main has them. Fewer heads are one tile.
_TILE = 64


def _takes(problem: MlaProblem) -> Verdict:
    if problem.s != 1 or (problem.h % _TILE and problem.h not in (16, 32)) or problem.page_size != _TILE:
        return Verdict.no(
            f"peer/tilelang_mla takes one query token, 16, 32 or a multiple of {_TILE} heads, and pages of {_TILE}; "
            f"the problem has s = {problem.s}, h = {problem.h}, pages of {problem.page_size}"
        )
    return takes_decode("tilelang_mla")(problem)


def splits_for(b: int, h: int, shortest: int, num_sms: int) -> int:
    """`num_split` for b requests of h heads, the shortest of `shortest` tokens: as many as the device has room for."""
    tiles = b * -(-h // _TILE)
    return max(1, min(num_sms // tiles, shortest // _TILE))


class TilelangMlaPlan(PeerDecodePlan):
    """TileLang's public MLA example, for decode in fp16."""

    peer = "tilelang_mla"
    requires = Requirement(archs=("sm_90a",), dtypes=("fp16",), problem=_takes)
    allocates = True
    input_options = {"poison": False}  # noqa: RUF012

    def attach(self, library: Library, *inputs: Any) -> Attached:
        q, kv_cache, page_table, seq_lens = inputs
        b, _, h, _ = q.shape
        pages, page = kv_cache.shape[:2]
        width = max(page_table.shape[1], -(-pages // b))
        table = page_table.new_zeros((b, width))
        table[:, : page_table.shape[1]] = page_table
        tokens = kv_cache.new_zeros((b * width * page, 1, LATENT + ROPE))
        tokens[: pages * page] = kv_cache.view(pages * page, 1, LATENT + ROPE)
        rows = q[:, 0]
        views = (rows[..., :LATENT], rows[..., LATENT:], tokens[..., :LATENT], tokens[..., LATENT:])
        split = [x.contiguous() for x in views]
        del tokens
        splits = splits_for(b, h, int(seq_lens.min()), (self.device or Device.get("h200")).num_sms)
        kernel = self._kernel(library, b, h, width * page, splits)
        partial = (q.new_empty((b, h, splits)), q.new_empty((b, h, splits, LATENT)))
        last = [q.new_empty((b, h, LATENT))]

        def call() -> None:
            last[0] = kernel(*split, table, seq_lens, *partial)

        def read() -> tuple[Any, ...]:
            empty = (seq_lens == 0).view(b, 1, 1, 1)
            return last[0].unsqueeze(1).masked_fill(empty, 0.0), self.reference_fn(*inputs)[1].float()

        return Attached(call, read, workspaces=partial, keep=(split, table), made=last)

    def _kernel(self, library: Library, b: int, h: int, longest: int, splits: int) -> Any:
        """The kernel for one shape; kernels bound through a plan share it."""
        key = ("tilelang", b, h, longest, splits)
        if key not in self.compiled:
            make = _example(library).mla_decode_tilelang
            if "softmax_scale" not in inspect.signature(getattr(make, "func", make)).parameters:
                raise UserError(
                    f"peer/tilelang_mla wants an example whose function takes softmax_scale, which {library.path} is "
                    "not: use a newer one."
                )
            sizes = (b, h, 1, longest, LATENT, ROPE, _TILE, min(_TILE, h), splits, _TILE)
            self.compiled[key] = make(*sizes, softmax_scale=self.problem.scale)
        return self.compiled[key]


def _example(library: Library) -> Any:
    """The example as a module; tilelang itself comes from beside it where it was fetched."""
    name = f"{libraries.FETCHED}_tilelang_example"
    if name in sys.modules and sys.modules[name].__file__ == str(library.path):
        return sys.modules[name]
    packages = libraries.tilelang_packages(library)
    if packages is not None and "tilelang" not in sys.modules:
        loaded = sys.modules.get("tvm_ffi")
        if loaded is not None and packages not in Path(loaded.__file__ or "").parents:
            raise UserError(
                f"peer/tilelang_mla needs its own TVM-FFI, and this process has loaded {_version(loaded)} for another "
                "kernel: measure it without those, in a run of its own."
            )
        sys.path.insert(0, str(packages))
        sys.path.append(str(packages.parent / "fallback"))
    try:
        import_module("tilelang")
    except ImportError as error:
        raise UserError(f"tilelang of {library.origin} does not load: {error}.") from error
    spec = util.spec_from_file_location(name, library.path)
    if spec is None or spec.loader is None:
        raise UserError(f"{library.path} is not a Python file.")
    module = util.module_from_spec(spec)
    spec.loader.exec_module(module)
    sys.modules[name] = module
    return module


def _version(module: Any) -> str:
    return f"TVM-FFI {getattr(module, '__version__', 'of another version')}"
