"""The prefill backend `MLA_VAR3`: new tokens of prompts, and pieces of the context before them, by `mla_prefill`.

vllm serve ... --attention-config '{"mla_prefill_backend": "MLA_VAR3"}'
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.v1.attention.backends.mla.prefill.base import MLAPrefillBackend

from mla_var3.engines.told import missing
from mla_var3.engines.vllm.releases import of_context
from mla_var3.ops.prefill import mla_prefill


class MlaVar3PrefillBackend(MLAPrefillBackend):
    """`mla_prefill` with the offsets of a step."""

    @staticmethod
    def get_name() -> str:
        return "MLA_VAR3"

    @classmethod
    def supports_compute_capability(cls, device_capability: Any) -> bool:
        return device_capability is not None and device_capability.major == 9

    @classmethod
    def is_available(cls) -> bool:
        return missing("vllm.mla_var3", "the prefill backend MLA_VAR3") is None

    def supports_out(self) -> bool:
        return True

    def run_prefill_new_tokens(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        return_softmax_lse: bool,
        out: torch.Tensor | None = None,
        output_scale: torch.Tensor | None = None,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """out (tokens, h, v), and LSE (h, tokens). output_scale is None, as `supports_quant_output` says."""
        offsets = self._prefill_metadata.query_start_loc
        return mla_prefill(
            q, k, v, offsets, offsets, scale=self.scale, causal=True, return_lse=return_softmax_lse, out=out
        )

    def run_prefill_context_chunk(
        self,
        chunk_idx: Any = None,
        q: Any = None,
        k: Any = None,
        v: Any = None,
        out: torch.Tensor | None = None,
        *,
        chunk: Any = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As above over a piece of the context, which all query tokens of its request see. Releases call the piece
        `chunk_idx`, a number, or `chunk`."""
        of_q, of_k = of_context(self._prefill_metadata, chunk_idx if chunk is None else chunk)
        made = mla_prefill(q, k, v, of_q, of_k, scale=self.scale, causal=False, return_lse=True, out=out)
        assert isinstance(made, tuple)
        return made
