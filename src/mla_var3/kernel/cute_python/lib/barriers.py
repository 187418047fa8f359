"""Named barriers and mbarrier helpers."""

from __future__ import annotations

import cutlass.cute as cute
from cutlass import Boolean, Int32
from cutlass._mlir.dialects import llvm
from cutlass.cutlass_dsl import T, dsl_user_op


def named_sync(barrier: int, threads: int) -> None:
    """Arrives at a named barrier and waits until `threads` threads have (ids 1..15; 0 is the block's own)."""
    cute.arch.barrier(barrier_id=int(barrier), number_of_threads=threads)


def named_arrive(barrier: int, threads: int) -> None:
    """Arrives at a named barrier without waiting."""
    cute.arch.barrier_arrive(barrier_id=int(barrier), number_of_threads=threads)


@cute.jit
def release(empty: cute.Pointer):
    """One arrival by this warp at an `empty` mbarrier that counts warps."""
    with cute.arch.elect_one():
        cute.arch.mbarrier_arrive(empty)


@dsl_user_op
def named_any(barrier: int, threads: int, holds: Boolean, *, loc=None, ip=None) -> Boolean:
    """`named_sync` that tells each of the threads whether `holds` for any of them (PTX `barrier.red.or`)."""
    # The NVVM operation reduces at barrier 0 only.
    result = llvm.inline_asm(
        T.i32(),
        [Int32(holds).ir_value(loc=loc, ip=ip)],
        "{.reg .pred in, any; setp.ne.b32 in, $1, 0; "
        f"barrier.cta.red.or.pred.aligned any, {int(barrier)}, {threads}, in; selp.b32 $0, 1, 0, any;}}",
        "=r,r,~{memory}",
        has_side_effects=True,
        is_align_stack=False,
        asm_dialect=llvm.AsmDialect.AD_ATT,
        loc=loc,
        ip=ip,
    )
    return Int32(result) != 0


@dsl_user_op
def wait(barrier: cute.Pointer, parity: Int32, *, loc=None, ip=None) -> None:
    """`cute.arch.mbarrier_wait` without a time after which it asks again: ptxas makes two instructions of it. Of the
    other it makes a second try, for all waits of a kernel beside the first or for all at the end of the code, by rules
    that could not be found; beside the first it cost a loop of products 6 %."""
    llvm.inline_asm(
        None,
        [barrier.toint(loc=loc, ip=ip).ir_value(loc=loc, ip=ip), Int32(parity).ir_value(loc=loc, ip=ip)],
        "{.reg .pred done; again: mbarrier.try_wait.parity.shared::cta.b64 done, [$0], $1; @!done bra again;}",
        "r,r,~{memory}",
        has_side_effects=True,
        is_align_stack=False,
        asm_dialect=llvm.AsmDialect.AD_ATT,
        loc=loc,
        ip=ip,
    )
