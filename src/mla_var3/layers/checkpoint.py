"""Weights of a checkpoint made ready for a layer: block-FP8 dequantised, names and shapes judged."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, MutableMapping
from typing import TYPE_CHECKING

from mla_var3.errors import UserError

if TYPE_CHECKING:
    import torch

BLOCK = 128  # rows and columns of a weight that share a scale, in DeepSeek's FP8 checkpoints
SCALE = "_scale_inv"  # q_b_proj.weight has its scales in q_b_proj.weight_scale_inv


def dequantise(name: str, weight: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """weight (rows, columns) in float8_e4m3fn times the scale of each element's block, in float32.

    scales: (ceil(rows / 128), ceil(columns / 128)). Blocks at the edges may be smaller. Raises `UserError` for others.
    """
    rows, columns = weight.shape
    expected = (-(-rows // BLOCK), -(-columns // BLOCK))
    if tuple(scales.shape) != expected:
        raise UserError(
            f"{name}{SCALE} is {tuple(scales.shape)} for a weight of {tuple(weight.shape)}: blocks of {BLOCK}x{BLOCK} "
            f"have {expected}."
        )
    spread = scales.float().repeat_interleave(BLOCK, 0)[:rows].repeat_interleave(BLOCK, 1)[:, :columns]
    return weight.float() * spread


def judge_names(given: Iterable[str], expected: Iterable[str]) -> None:
    """Raises `UserError` naming parameters that are missing, or that the layer has not."""
    names = set(expected)
    missing = sorted(names.difference(given))
    if missing:
        raise UserError(f"the checkpoint has no {', '.join(missing)}, which this config's layer needs.")
    unknown = sorted(set(given) - names - {name + SCALE for name in names})
    if unknown:
        raise UserError(f"the checkpoint has {', '.join(unknown)}, which this config's layer has not.")


def prepare(state: MutableMapping[str, torch.Tensor], prefix: str, expected: Mapping[str, torch.Tensor]) -> None:
    """Changes a state dict in place so that a layer can load it: its parameters `expected`, whose names have `prefix`
    before them in the state dict, come out in their dtypes and without scales.

    Raises `UserError` naming a shape that does not fit, or an FP8 weight without scales.
    """
    import torch

    for own, wanted in expected.items():
        name = prefix + own
        scales = state.pop(name + SCALE, None)
        weight = state.get(name)
        if weight is None:
            continue
        if weight.shape != wanted.shape:
            raise UserError(
                f"{name} is {tuple(weight.shape)} in the checkpoint and {tuple(wanted.shape)} in this config's layer."
            )
        if scales is not None:
            weight = dequantise(name, weight, scales)
        elif weight.dtype == torch.float8_e4m3fn:
            raise UserError(f"{name} is FP8 and has no {name}{SCALE}: its scales are needed.")
        state[name] = weight.to(wanted.dtype)
