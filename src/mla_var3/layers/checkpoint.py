"""Weights of a checkpoint made ready for a layer: 8-bit blocks dequantised, names, shapes and dtypes judged.

A weight in bf16, fp16, fp32 or fp64 is taken as it is. A weight of 8 bits is codes: it is taken times its scales, and
never without them. Whatever else a checkpoint can hold is refused by its name, because each of these would load without
an error and compute something else: codes taken for numbers, scales taken for numbers where they are exponents, and
scales beside a weight that may or may not have been multiplied by them already.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, MutableMapping
from typing import TYPE_CHECKING

from mla_var3.errors import UserError

if TYPE_CHECKING:
    import torch

BLOCK = 128  # rows and columns of a weight that share a scale, in DeepSeek's FP8 checkpoints
SCALE = "_scale_inv"  # q_b_proj.weight has its scales in q_b_proj.weight_scale_inv

#: Dtypes of weights that are numbers, and of weights that are codes, which count times their scales. uint8 is neither:
#: a tool that knows no 8-bit floats stores their bits so, and does not say which of them they are.
PLAIN = ("bfloat16", "float16", "float32", "float64")
CODES = ("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "int8")


def dequantise(name: str, weight: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """weight (rows, columns) in a dtype of `CODES` times the scale of each element's block, in float32.

    scales: (ceil(rows / 128), ceil(columns / 128)), in a dtype that `scales_of` takes. Blocks at the edges may be
    smaller. Raises `UserError` for others.
    """
    rows, columns = weight.shape
    expected = (-(-rows // BLOCK), -(-columns // BLOCK))
    if tuple(scales.shape) != expected:
        raise UserError(
            f"{name}{SCALE} is {tuple(scales.shape)} for a weight of {tuple(weight.shape)}: blocks of {BLOCK}x{BLOCK} "
            f"have {expected}."
        )
    factors = scales_of(name, scales).to(weight.device)
    spread = factors.repeat_interleave(BLOCK, 0)[:rows].repeat_interleave(BLOCK, 1)[:, :columns]
    return weight.float() * spread


def scales_of(name: str, scales: torch.Tensor) -> torch.Tensor:
    """The scales of a weight in float32. Those in uint8 are the bits of float8_e8m0fnu: byte b is 2^(b - 127), and 255
    is NaN, as in that dtype itself. Raises `UserError` for scales that are neither these nor floats of 16 bits or more.
    """
    import torch

    if scales.dtype == torch.uint8:
        scales = scales.view(torch.float8_e8m0fnu)
    if scales.dtype != torch.float8_e8m0fnu and short(scales) not in PLAIN:
        raise UserError(
            f"{name}{SCALE} is {scales.dtype}: scales are {', '.join(PLAIN)}, or powers of two in float8_e8m0fnu or as "
            "its bits in uint8."
        )
    return scales.float()


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

    Raises `UserError` naming the parameter whose shape does not fit, whose dtype is neither a number's nor a code's, or
    whose scales are missing, alone, beside a weight that needs none, or in a dtype that scales do not have.
    """
    for own, wanted in expected.items():
        name = prefix + own
        scales = state.pop(name + SCALE, None)
        weight = state.get(name)
        if weight is None:
            if scales is not None:
                raise UserError(
                    f"the checkpoint has {name}{SCALE} and no {name}: load a weight and its scales at once."
                )
            continue
        if weight.shape != wanted.shape:
            raise UserError(
                f"{name} is {tuple(weight.shape)} in the checkpoint and {tuple(wanted.shape)} in this config's layer."
            )
        state[name] = _weight(name, weight, scales).to(wanted.dtype)


def _weight(name: str, weight: torch.Tensor, scales: torch.Tensor | None) -> torch.Tensor:
    dtype = short(weight)
    if dtype in PLAIN:
        if scales is None:
            return weight
        what = "drop them if it is dequantised already, or load the weight of 8 bits that they belong to"
        if weight.dim() != 2:
            what = f"blocks of {BLOCK}x{BLOCK} are of projections alone, so drop them"
        raise UserError(f"{name} is {weight.dtype} and has scales beside it, {name}{SCALE}: {what}.")
    if weight.dim() != 2:
        raise UserError(f"{name} is {weight.dtype}: norms and biases have no scales, so load it in {', '.join(PLAIN)}.")
    if dtype not in CODES:
        raise UserError(
            f"{name} is {weight.dtype}: load it in {', '.join(PLAIN)}, or with {name}{SCALE} in {', '.join(CODES)}; "
            "bits of one of these that were stored in another dtype are to be viewed as it first."
        )
    if scales is None:
        raise UserError(f"{name} is {weight.dtype} and has no {name}{SCALE}: codes of 8 bits need their scales.")
    return dequantise(name, weight, scales)


def short(tensor: torch.Tensor) -> str:
    """A tensor's dtype without its package."""
    return str(tensor.dtype).removeprefix("torch.")
