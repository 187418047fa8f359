"""How long a call should take where nobody measured: the limit of the device, and how far measured points were from it.

    time(problem) = (limit(problem) + floor) · ratio

`limit` is the larger of FLOPs over the matrix peak and bytes over the read rate. `floor` is what even the best measured
call takes on top (launches, the first tile, the last store). `ratio` is a version's own: interpolated, in logarithms,
between the points where that version was measured, so that a version which wastes tensor work on few heads, or which
is slow to start, carries that with it.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mla_var3.errors import UserError

if TYPE_CHECKING:
    from mla_var3.device import Device
    from mla_var3.workload.decode import MlaProblem

STATES = ("burst", "sustained")
NEIGHBOURS = 4  # measured points that a prediction rests on
NEAR = 0.01  # squared distance under which two points count as the same place
#: What a prediction loses in trust for each unit that its nearest point is farther away than another version's. Of 0.03
#: to 3, 1.5 and more picked best on held-out cells (189, H200), and never what was not measured over what was.
DOUBT = 1.5


@dataclass(frozen=True)
class Place:
    """Where a problem lies, in octaves: what decides how near to the limit a version comes.

    rows: query rows that share a latent cache, of the mean request. limit: least microseconds of the problem on the
    device. blocks: 64-row blocks of work before any split. fill: mean length over the longest. other: what makes a
    problem another kind (mask, dtype, page, latent width).
    """

    rows: float
    limit: float
    blocks: float
    fill: float
    other: tuple[bool, str, int, int, int]

    def distance(self, to: Place) -> float:
        """Zero for the same place; an octave of rows or of fill counts 1, one of work or of blocks half."""
        work = (self.limit - to.limit) ** 2 + (self.blocks - to.blocks) ** 2
        kinds = sum(mine != theirs for mine, theirs in zip(self.other, to.other, strict=True))
        shape = (self.rows - to.rows) ** 2 + (self.fill - to.fill) ** 2
        return math.sqrt(shape + 0.25 * work) + 0.5 * kinds


def rates(device: Device, dtype: str, state: str) -> tuple[float, float]:
    """(matrix TFLOP/s, reading GB/s) that limits are taken from: measured ceilings of the device where there are any,
    else its data sheet. Raises `UserError` for a device that has neither."""
    matmul, read = device.ceiling("matmul_tflops", state), device.ceiling("read_gbps", state)
    tflops = matmul.value if matmul is not None else device.tflops.get(dtype) or device.tflops.get("bf16")
    gbps = read.value if read is not None else device.hbm_gbps
    if not tflops or not gbps:
        raise UserError(f"{device.key} has no peaks in devices.json, so times on it cannot be estimated.")
    return float(tflops), float(gbps)


# A hold-out asks for this and `place_of` of every point once for each problem that it leaves out.
@functools.lru_cache(maxsize=8192)
def limit_us(problem: MlaProblem, device: Device, states: Sequence[str] = STATES) -> float:
    """Least time of a problem in microseconds by the device's `rates`, the geometric mean over the states."""
    cost = problem.cost()
    logs = []
    for state in states:
        tflops, gbps = rates(device, problem.dtype, state)
        logs.append(math.log(max(cost.flops / tflops / 1e6, cost.bytes / gbps / 1e3, 1e-3)))
    return math.exp(sum(logs) / len(logs))


def has_peaks(device: Device) -> bool:
    """Whether `limit_us` knows the device's peaks, measured or published."""
    tflops = device.ceiling("matmul_tflops", STATES[0]) or device.tflops.get("bf16")
    return bool(tflops and (device.ceiling("read_gbps", STATES[0]) or device.hbm_gbps))


@functools.lru_cache(maxsize=8192)
def place_of(problem: MlaProblem, device: Device) -> Place:
    """Where a problem lies on a device."""
    masked = problem.tree or (problem.causal and problem.s > 1)
    rows = max(problem.query_tokens, 1) * problem.group / problem.b  # of the mean request
    other = (masked, problem.dtype, problem.page_size, problem.k, problem.p)
    blocks = problem.b * problem.h_kv * math.ceil(rows / 64)
    limit = math.log2(limit_us(problem, device))
    return Place(math.log2(rows), limit, math.log2(blocks), math.log2(problem.fill), other)


@dataclass(frozen=True)
class Guess:
    """A predicted time. us: microseconds. distance: to the nearest point. records: ids of the points it rests on,
    nearest first."""

    us: float
    distance: float
    records: tuple[str, ...]


def predict(place: Place, limit: float, floor: float, points: Sequence[tuple[Place, float, str]]) -> Guess:
    """The time at `place`, whose limit is `limit` us, from points (place, ratio, record id) of one version."""
    near = sorted((place.distance(at), ratio, record) for at, ratio, record in points)[:NEIGHBOURS]
    if not near:
        raise UserError("nothing was measured to predict from: give at least one point.")
    weights = [1.0 / (distance**2 + NEAR) ** 2 for distance, _, _ in near]
    mean = sum(w * math.log(ratio) for w, (_, ratio, _) in zip(weights, near, strict=True)) / sum(weights)
    return Guess((limit + floor) * math.exp(mean), near[0][0], tuple(record for _, _, record in near))
