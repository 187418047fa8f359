"""The plug-in of vLLM: the entry point `vllm.general_plugins` calls `register` in each of its processes.

    vllm serve deepseek-ai/DeepSeek-V3 --attention-backend MLA_VAR3
    vllm serve deepseek-ai/DeepSeek-V3.2 --attention-backend MLA_VAR3_SPARSE --kv-cache-dtype fp8_ds_mla

`dense` and `sparse` are the attention backends of decode, `prefill` is the one of prompts and of the context of chunks
(`--attention-config '{"mla_prefill_backend": "MLA_VAR3"}'`). `releases` is all that differs between releases of vLLM.
"""

from __future__ import annotations

import logging

_logger = logging.getLogger("vllm.mla_var3")  # below vLLM's own, whose handlers write


def register() -> None:
    """Makes the names known to vLLM. It may be called several times, imports no backend, and never raises: a server
    whose vLLM is of another kind starts without these kernels, with one warning."""
    try:
        from mla_var3.engines.vllm.releases import add_backends, unknown

        reason = unknown()
        if reason:
            _logger.warning("%s", reason)
        add_backends()
    except Exception as error:
        _logger.warning("The backends of mla_var3 are not available: %s: %s", type(error).__name__, error)
