"""What a compiled kernel takes of an SM, and which limits or fast paths it misses."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from mla_var3.errors import Infeasible
from mla_var3.toolchain import sass as sass_
from mla_var3.toolchain import spills
from mla_var3.toolchain.compiled import CompiledKernel, Resources

if TYPE_CHECKING:
    from mla_var3.device import Device

# Architecture -> (the tensor-core instructions worth having there, their name in sentences)
_FAST_MMA: Mapping[str, tuple[tuple[str, ...], str]] = {
    "sm_90a": (("HGMMA", "QGMMA", "IGMMA"), "warpgroup (HGMMA)"),
    "sm_100a": (("UTCMMA",), "tcgen05 (UTCMMA)"),
    "sm_103a": (("UTCMMA",), "tcgen05 (UTCMMA)"),
}
_WARP_MMA = ("HMMA", "QMMA", "IMMA", "OMMA")
_BULK_LOADS = ("UTMALDG", "UBLKCP")
# ptxas serialises warpgroup products by giving each its own WARPGROUP.ARRIVE and WARPGROUP.DEPBAR: exactly 2 for one.
# Kernels that overlap them have 0.1 to 0.5. Under a few products, one product a batch is all that there is to wait for.
_SERIAL_SYNCS = 1.9
_SERIAL_MIN = 4
# cuTile does a product that fits no tensor-core instruction with plain adds and multiplications, and says nothing.
# Tilings of one kernel that stay on the tensor cores differ by less: a quarter of the products (wider ones), a third
# more adds. Those that leave had a sixth at most, or none, and ten times the adds.
_FEW_PRODUCTS = 0.25
_MANY_ADDS = 4.0


def read(
    cubin: bytes | Path,
    device: Device,
    *,
    sass: str | None = None,
    smem_dynamic: int | Mapping[str, int] = 0,
    remarks: str = "",
) -> dict[str, Resources]:
    """The resources of every kernel in a cubin, by mangled name, in the cubin's order.

    sass: `sass.disassemble(cubin)`, if it is at hand. smem_dynamic: bytes at launch, for all kernels or by name.
    remarks: output of `ptxas -v`; its spill bytes are taken instead of those read off the code. ctas_per_sm is for
    `device`, 0 when a CTA does not fit on an SM.
    """
    code = sass_.functions(sass_.disassemble(cubin) if sass is None else sass)
    said = parse_ptxas(remarks)
    sizes = sass_.code_sizes(cubin)
    found: dict[str, Resources] = {}
    for name, used in sass_.usage(cubin).items():
        text = code.get(name, "")
        spilled = spills.of(text)
        dynamic = smem_dynamic.get(name, 0) if isinstance(smem_dynamic, Mapping) else smem_dynamic
        found[name] = Resources(
            registers=used.registers,
            smem_static=used.smem_static,
            smem_dynamic=dynamic,
            spill_bytes=said.get(name, sum(one.width for one in spilled)),
            spill_loop_bytes=spills.bytes_in(spilled, spills.LOOP),
            stack_bytes=used.stack_bytes,
            threads=used.threads,
            ctas_per_sm=device.ctas_per_sm(used.registers, used.smem_static + dynamic, used.threads),
            code_bytes=sizes.get(name, 0),
            instructions=sass_.count_instructions(text),
        )
    return found


def parse_ptxas(text: str) -> dict[str, int]:
    """Spill stores plus spill loads in bytes, by kernel, from what `ptxas -v` printed."""
    pattern = r"Function properties for (\S+)\s+ptxas[ .]+\d+ bytes stack frame, (\d+) bytes spill stores, (\d+) bytes"
    return {match[1]: int(match[2]) + int(match[3]) for match in re.finditer(pattern, text)}


def require(resources: Resources, device: Device) -> None:
    """Raises `Infeasible` for a kernel that the device cannot launch: it takes more than a block may have."""
    r = resources
    if r.smem > device.smem_per_block:
        raise Infeasible(
            f"shared memory of {r.smem:,} bytes is over the {device.smem_per_block:,} that a block of {device.key} may "
            "have: take smaller tiles or fewer stages"
        )
    if r.threads > device.max_threads_per_block:
        raise Infeasible(
            f"{r.threads} threads are over the {device.max_threads_per_block} that a block may have: take fewer"
        )
    if r.threads and r.registers > device.max_registers(r.threads):
        raise Infeasible(
            f"{r.registers} registers for each of {r.threads} threads are over the {device.max_registers(r.threads)} "
            f"that {device.key} has for them: take fewer threads, or smaller tiles"
        )


def problems(resources: Resources, device: Device) -> list[str]:
    """Fast paths of the device that a kernel which it can launch misses: one sentence each, worst first."""
    r, found = resources, list[str]()
    count = r.instructions
    if r.spill_bytes:
        found.append(
            f"spills registers: {r.spill_bytes:,} bytes of local-memory stores and loads "
            f"({count.get('STL', 0)} STL, {count.get('LDL', 0)} LDL){_in_the_loop(r)}"
        )
    elif r.stack_bytes:
        found.append(f"uses {r.stack_bytes:,} bytes of stack a thread without spilling: a call or a run-time index")
    found += _slow_paths(count, device)
    return found


def _in_the_loop(r: Resources) -> str:
    """How much of the spills is in the loop of products, where that is not all."""
    if r.spill_loop_bytes == r.spill_bytes:
        return ""
    some = f"{r.spill_loop_bytes:,} bytes" if r.spill_loop_bytes else "none"
    return f", {some} of them in the loop of products"


def _slow_paths(count: Mapping[str, int], device: Device) -> list[str]:
    if device.arch not in _FAST_MMA:
        return []
    fast_names, fast = _FAST_MMA[device.arch]
    quick = sum(count.get(name, 0) for name in fast_names)
    slow = {name: count[name] for name in _WARP_MMA if count.get(name)}
    found = []
    if slow:
        which = ", ".join(f"{n} {name}" for name, n in slow.items())
        extent = f"beside {quick} {fast}" if quick else f"and no {fast}"
        found.append(f"falls off the tensor-core path of {device.arch}: {which} {extent}; check the tile's shape")
    syncs = count.get("WARPGROUP", 0)
    if quick >= _SERIAL_MIN and syncs >= _SERIAL_SYNCS * quick:
        found.append(
            f"serialises its tensor-core products: {syncs} WARPGROUP instructions for {quick} {fast}, a wait for each; "
            "look at accumulators that are touched between products, and at the tile's shape"
        )
    if (quick or slow) and not any(count.get(name) for name in _BULK_LOADS):
        loads = f"{count.get('LDGSTS', 0)} LDGSTS, {count.get('LDG', 0)} LDG"
        found.append(f"loads its operands without TMA ({loads})")
    return found


def off_tensor_cores(compiled: CompiledKernel, usual: CompiledKernel | None, device: Device) -> str:
    """Why this code misses the device's fast tensor-core path, by its instruction counts; "" when it does not.

    usual: the same kernel in a tiling that is on that path. A product that is done by plain arithmetic shows only
    beside it: some kernels have no products at all.
    """
    if device.arch not in _FAST_MMA:
        return ""
    names, fast = _FAST_MMA[device.arch]
    beside = {stage.name: stage.resources.instructions for stage in _stages(usual)}
    for stage in _stages(compiled):
        count = stage.resources.instructions
        slow = next((p for p in _slow_paths(count, device) if p.startswith("falls off")), "")
        if slow:
            return f"{stage.name} {slow}"
        (quick, adds), (most, few) = (_products_and_adds(c, names) for c in (count, beside.get(stage.name, {})))
        if quick < _FEW_PRODUCTS * most and adds > _MANY_ADDS * few:
            return (
                f"{stage.name} falls off the tensor-core path of {device.arch}: {quick} {fast} and {adds} plain adds, "
                f"where another tiling has {most} and {few}; check the tile's shape"
            )
    return ""


def _stages(compiled: CompiledKernel | None) -> tuple[CompiledKernel, ...]:
    return () if compiled is None else compiled.stages or (compiled,)


def _products_and_adds(count: Mapping[str, int], names: tuple[str, ...]) -> tuple[int, int]:
    adds = sum(count.get(name, 0) * wide for name, wide in (("FADD", 1), ("FFMA", 1), ("FADD2", 2), ("FFMA2", 2)))
    return sum(count.get(name, 0) for name in names), adds
