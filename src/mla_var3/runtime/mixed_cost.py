"""A cost model for design `mla_var6_plus`: how many of the newest tokens to keep decompressed, on a device.

Per attending pair of a query row the latent form costs 2176 FLOPs and the decompressed one 640; per cached token of a
request they read 1152 bytes and 640 for every head. So decompressed tokens trade arithmetic for reading: they pay where
the latent path is bound by arithmetic and the memory has time left, which is where a request brings many query tokens.

The two paths run at once. The model lets them share the device perfectly, each resource busy with the sum of both:

    time = max(arithmetic of both, reading of both) + what starting, joining and projecting cost

Rows are counted as tiles hold them: few rows of the latent path are padded to 16, others to a multiple of 64; query
tokens of the decompressed path to a multiple of 64. That is why a single query token never wants n > 0.
`Rates` holds what share of a device's peaks the kernels are taken to reach; measure, then pass others.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mla_var3.errors import UserError
from mla_var3.runtime.mixed import takes_mixed

if TYPE_CHECKING:
    from mla_var3.device import Device
    from mla_var3.problem import MlaProblem

#: Distance of the values of n that `best_n` tries: one tile of keys.
STEP = 64


@dataclass(frozen=True)
class Rates:
    """Shares of the device's peaks, and fixed costs in microseconds.

    latent: of the dense rate, by the latent path: cutile-dsl/flash_mla reached 474 of an H200's 989 TFLOP/s at
    b128 h128. heads: by the decompressed path; taken to be the same, not measured. read: of the memory bandwidth:
    3.9 of 4.8 TB/s, same kernel, b128 h16. latent_us, heads_us: start and end of a path, its splits joined. fork_us:
    two streams instead of one. join_us: launch of the joining kernel, without its arithmetic and reading.
    """

    latent: float = 0.48
    heads: float = 0.48
    read: float = 0.81
    latent_us: float = 8.0
    heads_us: float = 5.0
    fork_us: float = 4.0
    join_us: float = 4.0


@dataclass(frozen=True)
class Prediction:
    """What the model says of one n. Microseconds; compute and memory are the sums over both paths and the joining."""

    n: int
    time_us: float
    compute_us: float
    memory_us: float

    @property
    def bound(self) -> str:
        """Which of the two sets the time."""
        return "compute" if self.compute_us >= self.memory_us else "memory"


def predict(problem: MlaProblem, device: Device, n: int, rates: Rates | None = None) -> Prediction:
    """The time of `problem` with its n newest tokens decompressed (whatever problem.n is), in microseconds.

    Raises `UserError` when the problem does not allow that n, or the device has no dense rate for its dtype.
    """
    rates = rates or Rates()
    if n < 0 or n > problem.t:
        raise UserError(f"n = {n} is outside 0..{problem.t}, the tokens of the problem.")
    pd = problem.replace(n=n)
    takes_mixed(pd).require(UserError)
    dense = device.tflops.get(pd.dtype)
    if dense is None:
        raise UserError(f"{device.key} has no dense rate for {pd.dtype}: choose one of {', '.join(device.tflops)}.")
    if device.hbm_gbps is None:
        raise UserError(f"{device.key} has no memory bandwidth in devices.json: add it to predict times.")
    flops_a_us, bytes_a_us = dense * 1e6, device.hbm_gbps * 1e3 * rates.read
    e, rows = pd.element_bytes, pd.b * pd.s * pd.h
    old, new = sum(pd.seq_lens) - pd.b * n, pd.b * n

    compute = old * _padded_rows(pd.s * pd.h) * 2 * (2 * pd.k + pd.p) / (flops_a_us * rates.latent)
    compute += new * _up(pd.s, 64) * pd.h * 2 * (2 * pd.d + pd.p) / (flops_a_us * rates.heads)
    moved = old * (pd.k + pd.p) * e + new * pd.h * (2 * pd.d + pd.p) * e + rows * pd.d * e
    fixed = 0.0
    if old:
        moved += rows * (pd.k + pd.p) * e
        fixed += rates.latent_us + rates.join_us
        # The joining kernel: reads what the latent path wrote, and W_UV.
        compute += rows * 2 * pd.d * pd.k / (flops_a_us * rates.latent)
        moved += (2 * rows + pd.h * pd.d) * pd.k * e
    if new:
        moved += rows * (pd.d + pd.p) * e
        fixed = max(fixed, rates.heads_us)
    if old and new:
        moved += 2 * rows * pd.d * e
        fixed += rates.fork_us
    memory = moved / bytes_a_us
    return Prediction(n, max(compute, memory) + fixed, compute, memory)


def best_n(
    problem: MlaProblem, device: Device, rates: Rates | None = None, candidates: Iterable[int] | None = None
) -> Prediction:
    """The prediction with the least time; of equal ones the smallest n, which caches least.

    candidates: values of n to choose from; by default multiples of `STEP` up to the shortest request, and that one.
    """
    most = min(problem.seq_lens)
    tried = sorted(set(candidates)) if candidates is not None else [*range(0, most, STEP), most]
    allowed = [n for n in tried if takes_mixed(problem.replace(n=n))]
    if not allowed:
        raise UserError(f"none of the candidates for n is possible for {problem.label}: include 0.")
    return min((predict(problem, device, n, rates) for n in allowed), key=lambda p: (p.time_us, p.n))


def _up(x: int, unit: int) -> int:
    return -(-x // unit) * unit


def _padded_rows(rows: int) -> int:
    return 16 if rows <= 16 else _up(rows, 64)
