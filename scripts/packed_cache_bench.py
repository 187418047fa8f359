#!/usr/bin/env python3
"""The parts of attention over a packed cache, each alone: what an SM converts and what it gathers.

    scripts/packed_cache_bench.py --compile     makes out/packed_cache_bench.cubin with nvcc; no GPU is needed
    scripts/packed_cache_bench.py               checks and times it on the GPU at hand, and prints a table

1. Ways to turn e4m3 codes and a scale into 16-bit values (packed_cache_bench.cu lists them): in registers; from rows of
   layout v32 in shared memory into a tile that wgmma reads (K-major, swizzled by 128 bytes), alone and while two
   warpgroups keep the tensor cores busy; and the same from rows in device memory, without a copy in between.
2. A gather of rows of layouts v32 and v4 into shared memory: cp.async of 16 bytes, or one bulk copy a row. sm_90 has no
   gather in TMA (tile::gather4 begins with sm_100).

A kernel whose values are wrong gets no time. Times are medians with a cold L2; rates count the bytes of rows.
"""

from __future__ import annotations

import argparse
import functools
import statistics
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "src"))
CUBIN = HERE.parent / "out" / "packed_cache_bench.cubin"

#: Each with its scale as it multiplies: in fp32, rounded to bf16 or to half, or not at all.
WAYS = {
    "copy": "none",
    "fp32": "fp32",
    "fp32_bf16": "bf16",
    "place_bf16": "bf16",
    "place_bf16_pairs": "bf16",
    "place_fp32": "fp32",
    "half": "none",
    "half_scaled": "half",
    "place": "none",
}
#: Their words hold codes 0 2 | 1 3 of four.
PAIRS = ("place_bf16_pairs", "place")
ROWS, TILE, V32, ELEMENTS = 64, 9 * 64 * 128, 656, 512
WARPS, REPEATS = (4, 8, 16), 7
MMA_WARPS, PRODUCT_CLOCKS = 8, 64


class Kernels:
    """The functions of the cubin, and one launch."""

    def __init__(self) -> None:
        from cuda.bindings import driver

        self.driver = driver
        self.module = self.ok(driver.cuModuleLoadData(CUBIN.read_bytes()))

    def ok(self, answer: tuple[Any, ...]) -> Any:
        if answer[0] != self.driver.CUresult.CUDA_SUCCESS:
            raise RuntimeError(f"{answer[0]}")
        return answer[1] if len(answer) > 1 else None

    def __call__(self, name: str, grid: int, threads: int, memory: int, *arguments: Any) -> None:
        """Tensors go as pointers, ints as int32 (or as given by ctypes), floats as float32."""
        import ctypes

        import torch

        function = self.ok(self.driver.cuModuleGetFunction(self.module, name.encode()))
        attribute = self.driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        self.ok(self.driver.cuFuncSetAttribute(function, attribute, memory))
        values: list[Any] = []
        types: list[Any] = []
        for x in arguments:
            if isinstance(x, torch.Tensor):
                values.append(x.data_ptr())
                types.append(ctypes.c_void_p)
            elif isinstance(x, ctypes.c_longlong):
                values.append(x.value)
                types.append(ctypes.c_longlong)
            else:
                values.append(x)
                types.append(ctypes.c_float if isinstance(x, float) else ctypes.c_int)
        stream = torch.cuda.current_stream().cuda_stream
        given = (tuple(values), tuple(types))
        self.ok(self.driver.cuLaunchKernel(function, grid, 1, 1, threads, 1, 1, memory, stream, given, 0))


class Bench:
    def __init__(self) -> None:
        import torch

        from mla_var3.packed_cache import LAYOUTS, new_cache, pack

        torch.manual_seed(0)
        self.flush = torch.empty(1 << 27, dtype=torch.int32, device="cuda")
        self.launch = Kernels()
        properties = torch.cuda.get_device_properties(0)
        self.sms = properties.multi_processor_count
        print(f"{properties.name}, {self.sms} SMs, torch {torch.__version__}, seed 0")
        self.caches = {}
        for name, pages in (("v32", 16384), ("v4", 16384)):
            layout = LAYOUTS[name]
            # Random bytes, and then a few pages of real tokens for what is read as values.
            cache = new_cache(layout, pages, 64, "cuda")
            whole = cache.as_strided((pages * layout.page_bytes(64),), (1,))
            whole.copy_(torch.randint(0, 256, whole.shape, dtype=torch.uint8, device="cuda"))
            if name == "v32":
                pack(layout, torch.randn(pages, 64, 576, dtype=torch.bfloat16, device="cuda"), powers=False, out=cache)
            self.caches[name] = whole
        self.tokens = 16384 * 64
        self.clocks = torch.zeros(2 * self.sms, dtype=torch.int64, device="cuda")
        self.out = torch.zeros(self.sms * 16 * 32 * V32, dtype=torch.uint8, device="cuda")

    def microseconds(self, run: Callable[[], None], cold: bool = True) -> float:
        import torch

        times = []
        for _ in range(REPEATS):
            if cold:
                self.flush.fill_(1)
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            run()
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end) * 1e3)
        return statistics.median(times)

    def expected(self, way: str, rows: Any) -> Any:
        """The tile (TILE,) uint8 of 64 rows (64, 656) uint8, from what e4m3 and the scales mean."""
        import torch

        codes = rows[:, :512].contiguous()
        scales = rows[:, 512:528].contiguous().view(torch.float32).repeat_interleave(128, dim=1)
        x = codes.view(torch.float8_e4m3fn).float().double()
        if way == "copy":
            words = codes.view(64, 128, 1, 4).expand(64, 128, 2, 4).reshape(64, 1024)
        else:
            if WAYS[way] == "bf16":
                scales = scales.to(torch.bfloat16)
            elif WAYS[way] == "half":
                scales = scales.half()
            if way == "place":
                x = x * 2.0**-120
            elif WAYS[way] != "none":
                x = x * scales.double()
            if way in PAIRS:
                x = x.view(64, 128, 2, 2).transpose(2, 3).reshape(64, 512)
            # The product of 4 and 24 bits is no float32: it rounds to float32 first in the kernel as well.
            values = x.float().to(torch.float16 if way.startswith("half") else torch.bfloat16)
            words = values.view(torch.uint8).view(64, 1024)
        blocks = torch.cat((words.view(64, 8, 8, 16), rows[:, 528:].reshape(64, 1, 8, 16)), dim=1)
        swapped = torch.arange(8, device=rows.device).view(1, 8) ^ torch.arange(64, device=rows.device).view(64, 1) % 8
        tile = blocks.gather(2, swapped.view(64, 1, 8, 1).expand(64, 9, 8, 16))
        return tile.transpose(0, 1).reshape(-1)

    def right(self, way: str, rows: Any) -> bool:
        """The first rows of the first CTA's tile, as many as there are, bit for bit."""
        import torch

        n = rows.shape[0]
        whole = torch.zeros(ROWS, V32, dtype=torch.uint8, device="cuda")
        whole[:n] = rows
        want, got = (x.view(9, ROWS, 128)[:, :n] for x in (self.expected(way, whole), self.out[:TILE]))
        return bool(torch.equal(want, got))

    def hostile_rows(self) -> Any:
        """(64, 656) uint8: all codes but NaN, and scales that are and are not powers of two."""
        import torch

        rows = torch.zeros(64, V32, dtype=torch.uint8, device="cuda")
        codes = torch.randint(0, 254, (64, 512), device="cuda")
        rows[:, :512] = torch.where(codes >= 127, codes + 1, codes).to(torch.uint8)
        scales = torch.rand(64, 4, device="cuda") * 0.05 + 1e-4
        scales[::2] = torch.exp2(torch.randint(-13, 3, (32, 4), device="cuda").float())
        rows[:, 512:528] = scales.view(torch.uint8)
        rows[:, 528:] = torch.randn(64, 64, device="cuda").to(torch.bfloat16).view(torch.uint8)
        return rows

    def convert(self) -> None:
        print(
            "\n1. Conversion. el: codes a clock and SM. tok: clocks a token of 512 codes, scales and rope. wN: warps."
        )
        print("   mma %: of the tensor cores' clocks, while rows are converted (64 bytes of shared memory a clock).")
        head = ["way", "scale"] + [f"regs el w{w}" for w in WARPS] + [f"tile tok w{w}" for w in WARPS]
        head += [f"+mma tok w{w} (mma %)" for w in WARPS[:2]]
        print("   " + " | ".join(head))
        rows, rounds = self.hostile_rows(), 200
        memory = TILE + ROWS * V32 + 1024
        for way, scale in WAYS.items():
            line = [way, scale]
            for warps in WARPS:
                self.launch(f"registers_{way}", self.sms, warps * 32, 0, 0.01, 10 * rounds, self.out, self.clocks)
                clocks = self.clocks[: self.sms].double().median().item()
                line.append(f"{10 * rounds * 16 * warps * 32 / clocks:.1f}")
            for mma in (False, True):
                for warps in WARPS[:2] if mma else WARPS:
                    name, threads = (f"tile_mma_{way}", warps + MMA_WARPS) if mma else (f"tile_{way}", warps)
                    self.out.zero_()
                    self.clocks.zero_()
                    self.launch(name, self.sms, threads * 32, memory, rows, rounds, self.out, self.clocks)
                    if not self.right(way, rows):
                        line.append("wrong")
                        continue
                    clocks = self.clocks.view(-1, 2).double().median(0).values
                    text = f"{clocks[0].item() / rounds / ROWS:.1f}"
                    busy = clocks[1].item() * PRODUCT_CLOCKS / clocks[0].item()
                    line.append(f"{text} ({100 * busy:.0f})" if mma else text)
            print("   " + " | ".join(line))

    def rates(self, us: float, size: int, ctas: int) -> str:
        clocks = self.clocks[:ctas].double().median().item()
        return f"{size / us / 1e3:.0f} GB/s, {size / ctas / clocks:.1f} B/clk"

    def read_limit(self) -> None:
        import ctypes

        whole = self.caches["v32"]
        grid, threads = self.sms * 4, 512
        units = whole.numel() // 16 // (8 * grid * threads) * 8 * grid * threads
        count = ctypes.c_longlong(units)
        us = self.microseconds(lambda: self.launch("read_all", grid, threads, 0, whole, count, self.out))
        print(f"   read in order: {units * 16 / us / 1e3:.0f} GB/s")

    def indices(self, order: str, count: int) -> Any:
        """(count,) int32 tokens, none twice."""
        import torch

        if order == "in order":
            return torch.arange(count, dtype=torch.int32, device="cuda")
        if order == "in L2":
            return torch.randperm(16384, device="cuda").int().repeat(-(-count // 16384))[:count].contiguous()
        return torch.randperm(self.tokens, device="cuda")[:count].int()

    def gathers(self) -> None:
        print("\n2. Gather. Bytes of rows; B/clk: of an SM. under way: rows of an SM that are fetched at a time.")
        self.read_limit()
        warps = 4
        for layout in ("v32", "v4"):
            size = {"v32": 656, "v4": 584}[layout]
            slot = {"v32": 656, "v4": 592}[layout]
            for rows in (8, 16, 32):
                for how in ("cp_async", "bulk"):
                    line = [f"{layout} {how}, {2 * warps * rows} rows under way"]
                    for order, ctas in (("random", self.sms), ("in order", self.sms), ("random", 1), ("in L2", 1)):
                        batches = (6000 if ctas > 1 else 12000) // (warps * rows)
                        tokens = self.indices(order, ctas * warps * rows * batches)
                        cache, memory = self.caches[layout], warps * (2 * rows * slot + 16)
                        call = (f"{how}_{layout}_{rows}", ctas, warps * 32, memory, cache, tokens, batches)
                        run = functools.partial(self.launch, *call, self.out, self.clocks)
                        us = self.microseconds(run, cold=order != "in L2")
                        last = tokens.view(batches, -1)[-1]
                        if not self.gathered(layout, last, ctas * warps * rows, slot):
                            line.append("wrong")
                            continue
                        text = self.rates(us, size * tokens.numel(), ctas)
                        where = order if ctas > 1 else f"one SM {order}"
                        line.append(f"{where} " + (text if ctas > 1 else text.split(", ")[1]))
                    print("   " + " | ".join(line))
        print("   v32 from device memory to the tile, converted on the way; a warp has four to eight rows under way")
        for way in WAYS:
            line = [way]
            for warps in WARPS:
                batches = 6000 // (4 * warps)
                tokens = self.indices("random", self.sms * warps * 4 * batches)
                call = (f"direct_{way}", self.sms, warps * 32, TILE, self.caches["v32"], tokens, batches)
                us = self.microseconds(functools.partial(self.launch, *call, self.out, self.clocks))
                rows = self.caches["v32"].view(-1, V32)[tokens.view(batches, self.sms, -1)[-1, 0].long()]
                if not self.right(way, rows):
                    line.append("wrong")
                    continue
                text = self.rates(us, V32 * tokens.numel(), self.sms)
                per_token = self.clocks[: self.sms].double().median().item() / (batches * 4 * warps)
                line.append(f"w{warps} {text}, {per_token:.1f} clk a token")
            print("   " + " | ".join(line))

    def gathered(self, layout: str, tokens: Any, rows: int, slot: int) -> bool:
        import torch

        got, whole, t = self.out[: rows * slot].view(rows, slot), self.caches[layout], tokens.long()
        if layout == "v32":
            return bool(torch.equal(got, whole.view(-1, V32)[t]))
        pages = whole.view(-1, 37440)
        data = pages[:, : 64 * 576].reshape(-1, 576)[t]
        scales = pages[:, 64 * 576 : 64 * 584].reshape(-1, 8)[t]
        return bool(torch.equal(got[:, :576], data) and torch.equal(got[:, 576:584], scales))


def main() -> None:
    parser = argparse.ArgumentParser(description="Parts of attention over a packed cache, measured alone.")
    parser.add_argument("--compile", action="store_true", help="make the cubin with nvcc, and end")
    if parser.parse_args().compile:
        CUBIN.parent.mkdir(exist_ok=True)
        arch = "-gencode=arch=compute_90a,code=sm_90a"
        source = str(HERE / "packed_cache_bench.cu")
        subprocess.run(["nvcc", "-std=c++17", "-O3", "-cubin", arch, "-o", str(CUBIN), source], check=True)
        return
    if not CUBIN.is_file():
        sys.exit(f"{CUBIN} is not there: run scripts/packed_cache_bench.py --compile first.")
    bench = Bench()
    bench.convert()
    bench.gathers()


if __name__ == "__main__":
    main()
