"""Rotary position embedding in both layouts, with YaRN's scaling as transformers has it for DeepSeek's models."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

if TYPE_CHECKING:
    import torch

    from mla_var3.layers.config import LayerConfig


#: By frequencies, factor, positions and device; gone with the last layer that reads it.
_TABLES: WeakValueDictionary[Any, torch.Tensor] = WeakValueDictionary()


def softmax_scale(config: LayerConfig) -> float:
    """The factor on q·k: (d + p)^-1/2, times the square of YaRN's mscale where the config gives `mscale_all_dim`."""
    scale = (config.d + config.p) ** -0.5
    weight = config.rope.get("mscale_all_dim")
    if config.rope_type == "yarn" and weight and config.rope["factor"] > 1:
        scale *= (0.1 * weight * math.log(config.rope["factor"]) + 1.0) ** 2
    return float(scale)


class Rope:
    """Rotates the rope columns of queries and keys by their tokens' positions. Columns stay where they are: the pairs
    of the interleaved layout are adjacent before and after."""

    def __init__(self, config: LayerConfig) -> None:
        frequencies, self.factor = _frequencies(config)
        self.interleaved = config.interleaved
        self._positions = config.max_positions
        self._tables: dict[torch.device, torch.Tensor] = {}
        # No buffer of a module: `module.to(torch.bfloat16)` would round it, and with it the angles of far positions.
        self._frequencies = {frequencies.device: frequencies}

    def angles(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and sin, (tokens, 1, p / 2) float32, of positions (tokens,) int64."""
        if positions.device not in self._frequencies:
            self._frequencies[positions.device] = next(iter(self._frequencies.values())).to(positions.device)
        angles = positions.float()[:, None, None] * self._frequencies[positions.device]
        return angles.cos() * self.factor, angles.sin() * self.factor

    def table(self, device: torch.device) -> torch.Tensor:
        """(max_positions, p) float32, cosines and then sines of every position, as `mla_var3.ops.rope_append` reads
        them: 42 MB of DeepSeek V3, one for all layers of a model."""
        if device not in self._tables:
            (frequencies, *_) = self._frequencies.values()
            key = (tuple(frequencies.tolist()), self.factor, self._positions, device)
            made = _TABLES.get(key)
            if made is None:
                import torch

                cos, sin = self.angles(torch.arange(self._positions, device=device))
                _TABLES[key] = made = torch.cat([cos[:, 0], sin[:, 0]], -1)
            self._tables[device] = made
        return self._tables[device]

    def rotate(self, x: torch.Tensor, angles: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        """x (tokens, heads, p) rotated in float32 and rounded once to its own dtype."""
        import torch

        cos, sin = angles
        if self.interleaved:
            a, b = x.float().unflatten(-1, (-1, 2)).unbind(-1)
            return torch.stack([a * cos - b * sin, b * cos + a * sin], -1).flatten(-2).to(x.dtype)
        a, b = x.float().chunk(2, -1)
        return torch.cat([a * cos - b * sin, b * cos + a * sin], -1).to(x.dtype)


def _frequencies(config: LayerConfig) -> tuple[torch.Tensor, float]:
    """Angle a position of each pair of columns, (p / 2,) float32, and the factor on cos and sin."""
    import torch

    with torch.device("cpu"):  # also where a model is built on "meta", whose weights come later
        if config.rope_type == "default":
            exponents = torch.arange(0, config.p, 2, dtype=torch.float32) / config.p
            return 1.0 / config.rope["rope_theta"] ** exponents, 1.0
        return _yarn(config)


def _yarn(config: LayerConfig) -> tuple[torch.Tensor, float]:
    from transformers import DeepseekV3Config
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    # Only the fields that the function reads: models differ in what else their configs have.
    fields = DeepseekV3Config(
        qk_rope_head_dim=config.p, max_position_embeddings=config.max_positions, rope_parameters=dict(config.rope)
    )
    frequencies, factor = ROPE_INIT_FUNCTIONS["yarn"](fields)
    return frequencies, float(factor)
