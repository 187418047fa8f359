"""The plug-in of SGLang: the entry point `sglang.srt.plugins` calls `register` in each of its processes.

    python -m sglang.launch_server --model deepseek-ai/DeepSeek-V3 --attention-backend mla_var3 --page-size 64
    MLA_VAR3_DSA=1 python -m sglang.launch_server --model deepseek-ai/DeepSeek-V3.2 --kv-cache-dtype fp8_e4m3 \\
        --dsa-decode-backend flashmla_kv --dsa-prefill-backend flashmla_kv

`mla_var3` decodes dense MLA, and verifies drafts. Sparse attention is a choice of the backend `dsa`: with MLA_VAR3_DSA
what it calls FlashMLA for is computed here, prompts too where that is chosen for them. Other prompts are SGLang's own.
"""

from __future__ import annotations

import logging
import os
from importlib import metadata

NAME = "mla_var3"
#: Releases whose contracts are known (tests/engines/contracts).
RELEASES = ("0.5.23",)
#: Environment: whether the backend `dsa` calls our kernel.
SPARSE = "MLA_VAR3_DSA"

_logger = logging.getLogger("sglang.mla_var3")


def register() -> None:
    """Makes the name known to SGLang: to its registry, its lists of choices and the handlers that say how an attention
    layer calls a backend. It may be called several times, imports no backend, and never raises."""
    try:
        version = metadata.version("sglang")
        if version not in RELEASES:
            _logger.warning(
                "SGLang %s is not known to mla_var3, which knows %s: it is taken for the last of these.",
                version, ", ".join(RELEASES),
            )  # fmt: skip
        _add()
    except Exception as error:
        _logger.warning("The backends of mla_var3 are not available: %s: %s", type(error).__name__, error)


def _add() -> None:
    from sglang.srt.arg_groups.choices import (
        ATTENTION_BACKEND_CHOICES,
        CHUNKED_PREFIX_CACHE_SUPPORTED_ATTENTION_BACKENDS,
    )
    from sglang.srt.layers.attention.attention_registry import register_attention_backend
    from sglang.srt.models.deepseek_common.attention_backend_handler import AttentionBackendRegistry

    for choices in (ATTENTION_BACKEND_CHOICES, CHUNKED_PREFIX_CACHE_SUPPORTED_ATTENTION_BACKENDS):
        if NAME not in choices:
            choices.append(NAME)
    # Without a handler a name gets that of Triton, which never decompresses heads.
    AttentionBackendRegistry.register(NAME, AttentionBackendRegistry.get_handler("flashmla"))
    register_attention_backend(NAME)(_dense)
    if os.environ.get(SPARSE, "0") == "1":
        register_attention_backend("dsa")(_sparse)


def _dense(runner: object) -> object:
    from mla_var3.engines.sglang.dense import create

    return create(runner)


def _sparse(runner: object) -> object:
    from mla_var3.engines.sglang.sparse import MlaVar3SparseBackend

    return MlaVar3SparseBackend(runner)
