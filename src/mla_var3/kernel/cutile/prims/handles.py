"""Passing tensors to cuTile kernels without compiling again for every batch or length.

`ct.launch` compiles once for each *specialisation* of its arguments. For an array that is its dtype, its rank and, for
ranks up to 5 and for every dimension, whether the extent is 1, whether it is a multiple of 16, whether the stride is 1
and whether it is a multiple of 16 bytes; whether the base address is a multiple of 16 bytes; and whether elements
overlap. Plain `int` and `float` arguments are run-time values of 32 bits and add nothing; `ct.Constant` arguments add
their value. So a tensor of shape (b, …) makes up to three kernels (b = 1, b a multiple of 16, other b), a page table
nine.

A kernel that takes `handle(tensor)`, one element with stride 1, has one specialisation whatever the tensor's shape. It
builds its arrays itself, from the pointer and run-time integers:

    q = ct.Array.from_foreign(Q.foreign_pointer, (b, S, HEADS, 576), (S * HEADS * 576, HEADS * 576, 576, 1))

The compiler still sees extents that are known at launch, so the TMA descriptors are made on the host as for arrays that
are arguments. Extents that come from memory (a length) would have it build descriptors on the device, in every CTA.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import cuda.tile as ct

from mla_var3.errors import UserError

if TYPE_CHECKING:
    import torch


def handle(tensor: torch.Tensor, name: str = "tensor") -> torch.Tensor:
    """The first element of a contiguous tensor, as a view of shape (1,): a pointer that never changes a specialisation.

    Raises `UserError` when the tensor is not contiguous or its address is not a multiple of 16 bytes.
    """
    if not tensor.is_contiguous():
        raise UserError(f"{name} is not contiguous (strides {tuple(tensor.stride())}): pass {name}.contiguous().")
    if tensor.data_ptr() % 16:
        raise UserError(f"{name} starts at an address that is not a multiple of 16 bytes: pass a copy of it.")
    return tensor.view(-1)[:1]


def handle_constraint(dtype: Any) -> Any:
    """What `ct.launch` assumes of a `handle`: for signatures that are compiled without tensors."""
    from cuda.tile.compilation import ArrayConstraint

    return ArrayConstraint(
        dtype,
        1,
        index_dtype=ct.int32,
        stride_lower_bound_incl=0,
        alias_groups=(),
        may_alias_internally=False,
        stride_constant=(1,),
        shape_constant=(1,),
        base_addr_divisible_by=16,
    )


def signature(handles: list[Any], scalars: list[Any], constants: list[Any]) -> Any:
    """A kernel's signature: handles of these dtypes, then run-time scalars of these dtypes, then constants."""
    from cuda.tile.compilation import CallingConvention, KernelSignature, ScalarConstraint

    parameters = [*map(handle_constraint, handles), *map(ScalarConstraint, scalars), *constants]
    return KernelSignature(parameters, CallingConvention.cutile_python_v2())


def ct_dtype(name: str) -> Any:
    """cuTile's dtype for a problem's: "bf16", "fp16" or "fp32"."""
    return {"bf16": ct.bfloat16, "fp16": ct.float16, "fp32": ct.float32}[name]
