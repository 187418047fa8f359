"""FlashInfer's paged MLA decode, backend fa3; see `mla_var3.kernel.peer.prims.flashinfer`."""

from __future__ import annotations

from mla_var3.device import Requirement
from mla_var3.kernel.peer.prims.flashinfer import FlashInferPlan
from mla_var3.kernel.peer.prims.kernel import takes_decode


class FlashInferFa3Plan(FlashInferPlan):
    """Plan of the fa3 backend."""

    peer = "flashinfer_fa3"
    backend = "fa3"
    requires = Requirement(archs=("sm_90a",), dtypes=("bf16", "fp16"), problem=takes_decode("flashinfer_fa3"))
