"""Named barriers, mbarriers and programmatic dependent launch."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64
from cutlass._mlir.dialects import llvm
from cutlass.base_dsl import Arch
from cutlass.cutlass_dsl import BaseDSL, T, dsl_user_op


def named_sync(barrier: int, threads: int) -> None:
    """Arrives at a named barrier (0 .. 15) and waits until `threads` threads have."""
    cute.arch.barrier(barrier_id=int(barrier), number_of_threads=threads)


def named_arrive(barrier: int, threads: int) -> None:
    """Arrives at a named barrier without waiting."""
    cute.arch.barrier_arrive(barrier_id=int(barrier), number_of_threads=threads)


@dsl_user_op
def named_any(barrier: int, threads: int, holds: Boolean, *, loc=None, ip=None) -> Boolean:
    """`named_sync` that returns in each thread whether `holds` in any of them (PTX `barrier.red.or`)."""
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


@cute.jit
def warp_arrive(barrier: cute.Pointer, blocks: int = 1):
    """One arrival of this warp at an mbarrier that counts warps; of a cluster, at that mbarrier of each CTA."""
    with cute.arch.elect_one():
        if blocks == 1:
            cute.arch.mbarrier_arrive(barrier)
        else:
            for block in range(blocks):
                cute.arch.mbarrier_arrive(barrier, block)


@cute.jit
def raise_flag(flag: cute.Pointer, value: Int32):
    """Adds to a flag, unless `value` is 0: publishes what this CTA wrote to global memory before (release); by one
    thread, behind a barrier of those that wrote. No branch: behind one, ptxas may take addresses that follow for not
    uniform."""
    cute.arch.inline_ptx(
        "{ .reg .pred p; setp.ne.s32 p, {$r1}, 0; @p red.release.gpu.global.add.u32 [{$r0}], {$r1}; }",
        read_only_args=[flag.toint(), value],
    )


@cute.jit
def take_flag(flag: cute.Pointer):
    """Waits for a flag (acquire) and lowers it; by one thread, in front of a barrier of those that read what it
    publishes."""
    raised = Int32(0)
    while raised == 0:
        raised = cute.arch.inline_ptx(
            "ld.acquire.gpu.global.u32 {$w0}, [{$r0}];", write_only_types=[Int32], read_only_args=[flag.toint()]
        )
    cute.make_tensor(flag, cute.make_layout(1))[0] = 0


def has_dependents() -> bool:
    """Whether the architecture that is compiled for knows programmatic dependent launch; at compile time."""
    return bool(BaseDSL._get_dsl().get_arch_enum() >= Arch.sm_90)


def launch_dependents() -> None:
    """`griddepcontrol.launch_dependents`: CTAs of a dependent kernel may come. Nothing on an architecture without."""
    if has_dependents():
        cute.arch.griddepcontrol_launch_dependents()


def grid_wait() -> None:
    """`griddepcontrol.wait`: the kernel before has ended. Nothing on an architecture without: kernels run in turn."""
    if has_dependents():
        cute.arch.griddepcontrol_wait()


@cute.jit
def wait_for_launch(addresses: Int64):
    """`griddepcontrol.wait` behind the computation of `addresses`, which are not 0: ptxas moves a wait without an
    operand up, in front of all that could run during it."""
    if cutlass.const_expr(has_dependents()):
        cute.arch.inline_ptx(
            "{ .reg .pred p; setp.ne.s64 p, {$r0}, 0; @p griddepcontrol.wait; }", read_only_args=[addresses]
        )
