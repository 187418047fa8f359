"""Compiles the smallest kernel of one language for one device: `python -m mla_var3.lab.doctor_probe triton h200`.

Prints one line of JSON. It runs in a process of its own, because a broken compiler can end the process.
"""

from __future__ import annotations

import json
import sys
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mla_var3.device import Device


def triton(device: Device) -> Any:
    """x + x over 128 floats."""
    import triton as triton_
    import triton.language as tl

    from mla_var3.toolchain.triton_ import compile_triton

    globals()["tl"] = tl  # Triton looks names up in the module

    @triton_.jit
    def probe(X, Y, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
        at = tl.arange(0, BLOCK)
        x = tl.load(X + at)
        tl.store(Y + at, x + x)

    return compile_triton(probe, {"X": "*fp32", "Y": "*fp32"}, {"BLOCK": 128}, device=device)


def cutile(device: Device) -> Any:
    """x + x over a tile of 128 floats."""
    import cuda.tile as ct
    from cuda.tile.compilation import ArrayConstraint, CallingConvention, KernelSignature

    from mla_var3.toolchain.cutile import compile_cutile

    globals()["ct"] = ct

    @ct.kernel
    def probe(x, y):  # type: ignore[no-untyped-def]
        tile = ct.load(x, (ct.bid(0),), (128,))
        ct.store(y, (ct.bid(0),), tile + tile)

    vector = ArrayConstraint(
        ct.float32, 1, index_dtype=ct.int32, stride_lower_bound_incl=0, alias_groups=(), may_alias_internally=False,
        stride_constant=(1,), stride_divisible_by=(1,), shape_divisible_by=(1,), base_addr_divisible_by=16,
    )  # fmt: skip
    return compile_cutile(probe, KernelSignature([vector] * 2, CallingConvention.cutile_python_v1()), device=device)


def cute(device: Device) -> Any:
    """x + x over 128 floats."""
    import cutlass
    import cutlass.cute as cute_
    from cutlass.cute.runtime import make_fake_compact_tensor

    from mla_var3.toolchain.cute import compile_cute, fake_stream

    globals()["cute_"] = cute_

    @cute_.kernel
    def probe(x: cute_.Tensor, y: cute_.Tensor):  # type: ignore[no-untyped-def]
        tid, _, _ = cute_.arch.thread_idx()
        y[tid] = x[tid] + x[tid]

    @cute_.jit
    def host(x: cute_.Tensor, y: cute_.Tensor, stream):  # type: ignore[no-untyped-def]
        probe(x, y).launch(grid=(1, 1, 1), block=(128, 1, 1), stream=stream)

    vectors = [make_fake_compact_tensor(cutlass.Float32, (128,)) for _ in range(2)]
    return compile_cute(host, [*vectors, fake_stream()], device=device)


PROBES = {"triton": triton, "cutile-dsl": cutile, "cute-dsl": cute}


def main() -> int:
    from mla_var3.device import Device

    language, key = sys.argv[1:3]
    began = time.perf_counter()
    try:
        compiled = PROBES[language](Device.get(key))
        answer = {"ok": True, "text": f"registers {compiled.resources.registers}"}
    except Exception as error:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [""]
        answer = {"ok": False, "text": f"{type(error).__name__}: {lines[0]}"}
    answer["seconds"] = round(time.perf_counter() - began, 1)
    print("\n" + json.dumps(answer))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
