"""Where a time stands under the roofline: FLOPs and bytes against measured ceilings, or the data sheet's."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mla_var3.device import Device

#: Dtypes that the measured product, which is bf16, speaks for.
_LIKE_BF16 = ("bf16", "fp16")


@dataclass(frozen=True)
class Roofline:
    """Limit of one call. limit_us None: a peak of this device is unknown. source: where the ceilings are from."""

    flops: int
    bytes: int
    limit_us: float | None
    bound: str
    source: str
    tflops: float | None = None
    gbps: float | None = None

    @property
    def intensity(self) -> float:
        return self.flops / self.bytes if self.bytes else 0.0

    def share(self, time_us: float) -> float | None:
        """Per cent of the limit that a time reaches."""
        return None if self.limit_us is None or time_us <= 0 else 100 * self.limit_us / time_us


def roofline(flops: int, bytes_: int, dtype: str, device: Device, state: str = "burst") -> Roofline:
    """The limit of work with these FLOPs and bytes; `state` of the measured ceilings, where there are any."""
    product = device.ceiling("matmul_tflops", state) if dtype in _LIKE_BF16 else None
    read = device.ceiling("read_gbps", state)
    tflops = product.value if product is not None else device.tflops.get(dtype)
    gbps = read.value if read is not None else device.hbm_gbps
    if not tflops or not gbps:
        return Roofline(flops, bytes_, None, "unknown", f"no peak of {device.name} is known for {dtype}")
    compute, memory = flops / tflops / 1e6, bytes_ / gbps / 1e3
    source = ", ".join(
        f"{value:,.0f} {unit} ({'measured ' + c.date if c is not None else 'data sheet'})"
        for c, value, unit in ((product, tflops, "TFLOP/s"), (read, gbps, "GB/s"))
    )
    bound = "compute" if compute >= memory else "memory"
    return Roofline(flops, bytes_, max(compute, memory), bound, source, tflops, gbps)
