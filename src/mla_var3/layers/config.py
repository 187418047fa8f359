"""What a Hugging Face config says of its MLA layer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mla_var3.errors import UserError

#: Model types whose attention `MlaAttention` is. Others have the same fields and compute something else: no rope (Kimi
#: Linear), an indexer (DeepSeek V3.2, GLM 5), further scales (LongCat, MiniCPM3).
MODELS = ("deepseek_v2", "deepseek_v3", "kimi_k2")
ROPE_TYPES = ("default", "yarn")


@dataclass(frozen=True)
class LayerConfig:
    """Sizes of an MLA layer, in the symbols of `mla_var3.workload.decode` where that has one.

    hidden: columns of a hidden state. h: heads. q_rank: columns of the compressed query, None where q is projected in
    one step. k: latent columns. d: columns of q and k without rope. p: with rope. v: columns of a head's value.
    bias: of the down-projections and the output projection. interleaved: rope rotates columns 2i and 2i + 1, else i
    and i + p/2. rope: transformers' `rope_parameters`. max_positions: the longest context that the model is made for.
    """

    hidden: int
    h: int
    q_rank: int | None
    k: int
    d: int
    p: int
    v: int
    bias: bool
    interleaved: bool
    rope: Mapping[str, Any]
    max_positions: int

    @property
    def rope_type(self) -> str:
        return str(self.rope["rope_type"])


def read_config(config: Any) -> LayerConfig:
    """A `LayerConfig` from the config of a model: transformers' own, or the class that comes with a checkpoint, as Kimi
    K2's, whose `rope_scaling` and `rope_theta` transformers' base class has put together. Of a multimodal model, the
    config of its text part is read.

    Raises `UserError` in one sentence for a config of another attention.
    """
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    kind = getattr(text, "model_type", None)
    if kind not in MODELS:
        raise UserError(
            f"{type(config).__name__} is of model type {kind!r}: MlaAttention is the attention of {', '.join(MODELS)}."
        )
    shape = LayerConfig(
        hidden=text.hidden_size,
        h=text.num_attention_heads,
        q_rank=text.q_lora_rank,
        k=text.kv_lora_rank,
        d=text.qk_nope_head_dim,
        p=text.qk_rope_head_dim,
        v=text.v_head_dim,
        bias=bool(getattr(text, "attention_bias", False)),
        # Only transformers' V3 has the field; all published weights are interleaved.
        interleaved=bool(getattr(text, "rope_interleave", True)),
        rope=text.rope_parameters,
        max_positions=text.max_position_embeddings,
    )
    if shape.rope_type not in ROPE_TYPES:
        raise UserError(f"rope_type {shape.rope_type!r} is not supported: MlaAttention has {' and '.join(ROPE_TYPES)}.")
    return shape
