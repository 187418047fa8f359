"""`MlaAttention` on a GPU: decode by `mla_decode`, against transformers' module with the same weights."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers", reason="transformers is in the extra `layers`: make test installs it")

import layer_cases as cases  # noqa: E402

from mla_var3.errors import UserError  # noqa: E402
from mla_var3.layers import LatentCache, MlaAttention  # noqa: E402

pytestmark = pytest.mark.gpu


def real(h: int, **changes: Any) -> Any:
    """A layer with the widths of DeepSeek V3, but for the hidden state and the heads."""
    sizes = {"hidden_size": 2048, "q_lora_rank": 1536, "num_attention_heads": h, "num_key_value_heads": h}
    yarn = cases.YARN | {"original_max_position_embeddings": 4096}
    return cases.v3(**cases.REAL | sizes | {"max_position_embeddings": 163840, "rope_parameters": yarn} | changes)


@pytest.mark.parametrize(
    "config",
    [real(16), real(128), real(16, rope_interleave=False, q_lora_rank=None)],
    ids=["h16", "h128", "h16 halves"],
)
def test_errors_in_bf16_are_no_larger_than_those_of_transformers(config: Any) -> None:
    cases.assert_rounded_as_often(cases.rounding_errors(config, [700, 64, 1, 1029], 32, "cuda"))


def test_decode_in_float32_is_refused() -> None:
    """What `mla_decode` says reaches the user: nothing slow takes its place."""
    layer = MlaAttention(real(16), device="cuda")
    cache = LatentCache(1, 1, 64, columns=layer.columns, device="cuda")
    with pytest.raises(UserError, match=r"torch.float32: the kernels compute in torch.bfloat16 and torch.float16"):
        layer(torch.zeros(1, 2048, device="cuda"), cache.pages[0], cache.extend({cache.join(): 1}))
