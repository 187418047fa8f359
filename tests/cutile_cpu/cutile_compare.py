"""Comparing what two runs of a kernel wrote."""

from __future__ import annotations

from typing import Any

import torch
from cutile_cases import Case


def to_list(value: Any) -> list[torch.Tensor]:
    return list(value) if isinstance(value, (tuple, list)) else [value]


def ulp(x: torch.Tensor) -> torch.Tensor:
    """Distance from |x| to the next larger number of its type, as float64; of the smallest normal for smaller ones."""
    info = torch.finfo(x.dtype)
    _, exponent = torch.frexp(x.abs().double().clamp(min=info.tiny))
    return 2.0 ** (exponent - 1).double() * info.eps


def difference(case: Case, got: torch.Tensor, want: torch.Tensor) -> str:
    """ "" when `got` is `want` within what the case allows, else where and how much."""
    if got.dtype != want.dtype or got.shape != want.shape:
        return f"{case.name}: {got.dtype} {tuple(got.shape)} and not {want.dtype} {tuple(want.shape)}"
    if not got.dtype.is_floating_point:
        wrong = got.view(torch.uint8) != want.contiguous().view(torch.uint8)
        return f"{case.name}: {int(wrong.sum())} bytes differ: {got.tolist()} {want.tolist()}" if wrong.any() else ""
    a, b = got.double(), want.double()
    same = (a == b) & (torch.signbit(a) == torch.signbit(b)) | (torch.isnan(a) & torch.isnan(b))
    if case.ulps or case.absolute:
        allowed = case.ulps * ulp(want.to(torch.float32) if want.dtype.itemsize == 1 else want) + case.absolute
        same |= (a - b).abs() <= allowed
    if bool(same.all()):
        return ""
    at = tuple((~same).nonzero()[0].tolist())
    return f"{case.name}: {int((~same).sum())} of {same.numel()} differ, first at {at}: {a[at]!r} and not {b[at]!r}"
