"""A cost model for design `mla_var6_plus`: how many of the newest tokens to keep decompressed, on a device.

Per attending pair of a query row the latent form costs 2176 FLOPs and the decompressed one 640; per cached token of a
request they read 1152 bytes and 640 for every head. So decompressed tokens trade arithmetic for reading: they pay where
the latent path is bound by arithmetic and the memory has time left, which is where a request brings many query tokens.

The model has two ends between which a device lies, `Rates.overlap` of the way from the first to the second:

    one after the other   time = max(arithmetic, reading) of one path + the same of the other
    shared perfectly      time = max(arithmetic of both, reading of both)

and adds what starting, joining and projecting cost. On an H200 the measured share is 0: the paths are launched on two
streams, but each kernel's block fills an SM, so the blocks of one wait for those of the other (devlog of
cutile-dsl/mla_var6_plus). Time is then a straight line in n from all latent to all decompressed, and the best n is one
of the two ends: n = 0 or n = t. With overlap = 1 the model says what a version that shares SMs could reach.

Rows are counted as tiles hold them: few rows of the latent path are padded to 16, others to a multiple of 64; query
tokens of the decompressed path to a multiple of 64. That is why a single query token never wants n > 0.
`Rates` holds what share of a device's peaks the kernels reach: measured on an H200. Elsewhere measure, and pass others.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mla_var3.errors import UserError
from mla_var3.runtime.correctness.mixed import takes_mixed

if TYPE_CHECKING:
    from mla_var3.device import Device
    from mla_var3.problem import MlaProblem

#: Distance of the values of n that `best_n` tries: one tile of keys.
STEP = 64


@dataclass(frozen=True)
class Rates:
    """Shares of the device's peaks, and fixed costs in microseconds, as b16 h128 t4096 showed on an H200 (cool chip).

    latent: of the dense rate, by the latent path; 470 to 490 of 989 TFLOP/s from 4 query tokens on. heads: by the
    decompressed path, as cutile-dsl/flash_attention does at 8192 tokens; its own time at up to 64 query tokens is
    reading. read: of the memory bandwidth, by the latent path; 3.9 of 4.8 TB/s at b128 h16. heads_read: by the
    decompressed one, 4.55 of 4.8. latent_us, heads_us: start and end of a path, its splits joined. fork_us: what
    a second path adds beside its own time. join_us: launch of the joining kernel, without its arithmetic and reading.
    overlap: how far the paths share the device, 0 (one after the other) to 1 (perfectly).
    """

    latent: float = 0.48
    heads: float = 0.68
    read: float = 0.81
    heads_read: float = 0.95
    latent_us: float = 8.0
    heads_us: float = 5.0
    fork_us: float = 15.0
    join_us: float = 4.0
    overlap: float = 0.0


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
    if not 0 <= rates.overlap <= 1:
        raise UserError(f"overlap = {rates.overlap} is outside 0..1.")
    flops_a_us, bytes_a_us = dense * 1e6, device.hbm_gbps * 1e3
    e, rows = pd.element_bytes, pd.b * pd.s * pd.h
    old, new = sum(pd.seq_lens) - pd.b * n, pd.b * n

    # Of the latent path with its projection, then of the decompressed one: arithmetic, reading.
    paths: list[tuple[float, float]] = []
    fixed = 0.0
    if old:
        flops = old * _padded_rows(pd.s * pd.h) * 2 * (2 * pd.k + pd.p)
        moved = old * (pd.k + pd.p) * e + rows * (pd.k + pd.p) * e
        # The joining kernel: reads what the latent path wrote, and W_UV; writes the output.
        flops += rows * 2 * pd.d * pd.k
        moved += (2 * rows + pd.h * pd.d) * pd.k * e + rows * pd.d * e
        paths.append((flops / (flops_a_us * rates.latent), moved / (bytes_a_us * rates.read)))
        fixed += rates.latent_us + rates.join_us
    if new:
        flops = new * _up(pd.s, 64) * pd.h * 2 * (2 * pd.d + pd.p)
        # Its output is the whole one's, or is written and read once more.
        moved = new * pd.h * (2 * pd.d + pd.p) * e + rows * (pd.d + pd.p) * e + rows * pd.d * e * (2 if old else 1)
        paths.append((flops / (flops_a_us * rates.heads), moved / (bytes_a_us * rates.heads_read)))
        fixed = max(fixed, rates.heads_us)
    if old and new:
        fixed += rates.fork_us
    compute, memory = sum(c for c, _ in paths), sum(m for _, m in paths)
    apart = sum(max(path) for path in paths)
    time = rates.overlap * max(compute, memory) + (1 - rates.overlap) * apart
    return Prediction(n, time + fixed, compute, memory)


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
