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

    Raises `UserError` in one sentence for what is no config, for one of another attention, and for one that lacks a
    field or has no number in it, which it names.
    """
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    if not hasattr(text, "model_type"):
        if isinstance(config, Mapping):
            version = 2 if config.get("model_type") == "deepseek_v2" else 3
            what = f"DeepseekV{version}Config(**config)"
        else:
            what = "AutoConfig.from_pretrained(name)"
        raise UserError(
            f"config is of type {type(config).__name__}: pass the model's config of transformers, as {what} gives it."
        )
    kind = text.model_type
    if kind not in MODELS:
        raise UserError(
            f"{type(config).__name__} is of model type {kind!r}: MlaAttention is the attention of {', '.join(MODELS)}."
        )
    return LayerConfig(
        hidden=_count(text, "hidden_size"),
        h=_count(text, "num_attention_heads"),
        q_rank=None if getattr(text, "q_lora_rank", 0) is None else _count(text, "q_lora_rank"),
        k=_count(text, "kv_lora_rank"),
        d=_count(text, "qk_nope_head_dim"),
        p=_count(text, "qk_rope_head_dim"),
        v=_count(text, "v_head_dim"),
        bias=bool(getattr(text, "attention_bias", False)),
        # transformers' V3 alone reads the field; its V2 turns interleaved columns whatever a config says, as the
        # weights of all published models are.
        interleaved=kind == "deepseek_v2" or bool(getattr(text, "rope_interleave", True)),
        rope=_rope(text),
        max_positions=_count(text, "max_position_embeddings"),
    )


def _count(config: Any, name: str) -> int:
    value = getattr(config, name, None)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        found = f"{name} = {value!r}" if hasattr(config, name) else f"no {name}"
        raise UserError(f"{type(config).__name__} has {found}: set it to the model's, an integer of 1 or more.")
    return value


def _rope(config: Any) -> Mapping[str, Any]:
    """A config's `rope_parameters`, of which those that are read here are there and can be computed with."""
    whose = type(config).__name__
    rope = getattr(config, "rope_parameters", None)
    if not isinstance(rope, Mapping) or not rope:
        found = f"rope_parameters = {rope!r}" if hasattr(config, "rope_parameters") else "no rope_parameters"
        raise UserError(
            f"{whose} has {found}: set them to the model's, as {{'rope_type': 'default', 'rope_theta': 10000.0}}."
        )
    kind = rope.get("rope_type")
    if kind is None:
        raise UserError(
            f"rope_parameters of {whose} have no rope_type: set it to {' or '.join(map(repr, ROPE_TYPES))}."
        )
    if kind not in ROPE_TYPES:
        raise UserError(f"rope_type {kind!r} is not supported: MlaAttention has {' and '.join(ROPE_TYPES)}.")
    needed = ("rope_theta", "factor") if kind == "yarn" else ("rope_theta",)
    # As in transformers: a factor of None is the ratio of the two longest positions, and mscale_all_dim needs a number.
    if "factor" in rope and rope["factor"] is None and not rope.get("mscale_all_dim"):
        needed = ("rope_theta",)
    for name in needed:
        value = rope.get(name)
        if not isinstance(value, int | float) or isinstance(value, bool) or not value > 0:
            found = f"{name} = {value!r}" if name in rope else f"no {name}"
            raise UserError(
                f"rope_parameters of {whose}, of rope_type {kind!r}, have {found}: set it to the model's, a number "
                "above 0."
            )
    return rope
