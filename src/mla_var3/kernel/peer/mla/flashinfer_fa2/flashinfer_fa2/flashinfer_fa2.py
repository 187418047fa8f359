"""FlashInfer's paged MLA decode, backend fa2; see `mla_var3.kernel.peer.prims.flashinfer`."""

from __future__ import annotations

from mla_var3.device import Requirement
from mla_var3.kernel.peer.prims.flashinfer import FlashInferPlan
from mla_var3.kernel.peer.prims.kernel import takes_decode


class FlashInferFa2Plan(FlashInferPlan):
    """Plan of the fa2 backend."""

    peer = "flashinfer_fa2"
    backend = "fa2"
    requires = Requirement(archs=("sm_90a",), dtypes=("bf16", "fp16"), problem=takes_decode("flashinfer_fa2"))
