"""What stands out in the evidence: each sign with its numbers, its weight, and whether the numbers settle it.

A sign that only makes something likely says so, and what would settle it. Thresholds are the house's own unless a
source stands beside them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from mla_var3.lab.diagnosis.evidence import Evidence
from mla_var3.lab.profiling.modes.counters import STALLS

_BUSY, _LOW = 60.0, 50.0
_TRAFFIC = 1.15
_CLOCK = 0.93
_WARP_MMA = ("HMMA", "QMMA", "IMMA", "OMMA")
_FAST_MMA = ("HGMMA", "QGMMA", "IGMMA", "UTCMMA")


@dataclass(frozen=True)
class Sign:
    """title: in a few words. text: the sentence with the numbers. weight: 0 to 100. settled: False is a suspicion."""

    key: str
    title: str
    text: str
    weight: int
    settled: bool = True


def spills(e: Evidence) -> Iterator[Sign]:
    taken, count = e.resources, e.instructions
    if not taken:
        return
    spilled, registers = taken.get("spill_bytes", 0), taken.get("registers", 0)
    inside = taken.get("spill_loop_bytes")
    told = (
        f"{spilled:,} bytes a thread of local-memory traffic in the code ({count.get('STL', 0)} STL, "
        f"{count.get('LDL', 0)} LDL) at {registers} registers"
    )
    if spilled and inside == 0:
        yield Sign(
            "spills outside",
            "it spills registers outside of its loop of products",
            f"{told}, none of them in the loop of products: they cost a fixed time for each split or CTA",
            24,
        )
    elif spilled:
        wait = sum(e.stalls.get(name, 0.0) for name in ("lg_throttle", "long_scoreboard"))
        felt = f"; warps wait {wait:.0f} % of their time for global and local memory" if wait >= 10 else ""
        where = "" if inside is None else f", {inside:,} bytes of it in the loop of products"
        yield Sign(
            "spills",
            "it spills registers",
            f"{told}{where}{felt}",
            92 if wait >= 20 or (inside or spilled) >= 512 else 60,
            settled=inside is not None and (wait >= 10 or not e.stalls),
        )
    elif registers >= 255:
        yield Sign(
            "register ceiling",
            "it stands at the register ceiling",
            f"{registers} registers a thread, the most there are: the next variable spills",
            42,
        )


def pipelining(e: Evidence) -> Iterator[Sign]:
    count, stalls, figures = e.instructions, e.stalls, e.figures
    fast = sum(count.get(name, 0) for name in _FAST_MMA)
    products = fast + sum(count.get(name, 0) for name in _WARP_MMA)
    stages = e.tiling.get("num_pipeline_stages", e.tiling.get("num_stages"))
    waits = stalls.get("long_scoreboard", 0.0)
    slack = bool(figures) and figures.get("tensor", 0.0) < _BUSY and figures.get("dram", 0.0) < _BUSY
    felt = f"; warps wait {waits:.0f} % of their time for loads while nothing is busy" if slack and waits >= 20 else ""
    asynchronous = sum(count.get(name, 0) for name in ("UTMALDG", "UBLKCP", "LDGSTS"))
    if products and not asynchronous:
        yield Sign(
            "no pipelining",
            "loads and products do not overlap",
            f"no asynchronous copy stands in the code (no TMA, no LDGSTS) beside {products} products{felt}",
            88,
        )
    elif stages == 1:
        yield Sign(
            "no pipelining",
            "loads and products do not overlap",
            f"the tiling has one pipeline stage: a tile is loaded when the one before it was used up{felt}",
            88,
        )
    elif slack and waits >= 30:
        roles = ", a part of it producer warps that wait for room and cost nothing" if count.get("USETMAXREG") else ""
        yield Sign(
            "no pipelining",
            "it waits for loads that nothing overlaps",
            f"warps wait {waits:.0f} % of their time for loads{roles}, with DRAM at {figures.get('dram', 0):.0f} % and "
            f"the tensor pipe at {figures.get('tensor', 0):.0f} %: more stages, or loads asked for earlier",
            80,
            settled=False,
        )
    syncs = count.get("WARPGROUP", 0)
    # ptxas gives a product that it serialises an ARRIVE and a DEPBAR of its own: 2 for each, against 0.1 to 0.5.
    if fast >= 4 and syncs >= 1.9 * fast:
        yield Sign(
            "serial products",
            "each tensor-core product is waited for",
            f"{syncs} WARPGROUP instructions for {fast} products: the compiler serialises them",
            90,
        )
    gmma = stalls.get("gmma", 0.0) + stalls.get("warpgroup_arrive", 0.0)
    if gmma >= 25 and figures.get("tensor", 100.0) < 70:
        yield Sign(
            "waits for products",
            "it waits for its own products",
            f"{gmma:.0f} % of warp time goes to waiting for products, with the tensor pipe at "
            f"{figures['tensor']:.0f} %: too few are in flight, or they are small",
            72,
        )


def conflicts(e: Evidence) -> Iterator[Sign]:
    share = e.figures.get("conflicts")
    waits = e.stalls.get("short_scoreboard", 0.0) + e.stalls.get("mio_throttle", 0.0)
    if share is not None:
        if share >= 10:
            yield Sign(
                "bank conflicts",
                "shared memory has bank conflicts",
                f"{share:.0f} % of the wavefronts of shared memory are conflicts; warps wait {waits:.0f} "
                "% of their time for it: swizzle or pad the layout",
                86 if waits >= 15 else 45,
            )
    elif waits >= 25 and e.figures.get("tensor", 0.0) < _BUSY:
        yield Sign(
            "bank conflicts",
            "it waits for shared memory, bank conflicts perhaps",
            f"warps wait {waits:.0f} % of their time for shared memory and special functions, which is at "
            f"{e.figures.get('l1', 0):.0f} % of its throughput; a new profile counts the conflicts",
            76,
            settled=False,
        )


def rows(e: Evidence) -> Iterator[Sign]:
    count, have = e.instructions, getattr(e.problem, "rows", None)
    tile, busy, useful = e.tiling.get("tile_m"), e.figures.get("tensor"), e.useful("tensor")
    slow = {name: count[name] for name in _WARP_MMA if count.get(name)}
    fast = sum(count.get(name, 0) for name in _FAST_MMA)
    arch = e.device.arch if e.device else ""
    if slow and not fast and arch in ("sm_90a", "sm_100a", "sm_103a"):
        which = ", ".join(f"{n} {name}" for name, n in slow.items())
        yield Sign(
            "slow products",
            "its products miss the fast path of the tensor cores",
            f"{which} and no product of {arch}'s own kind: a side of the tile is below the smallest shape, or the "
            f"compiler fell back; {have or 'its'} query rows share a cache",
            84,
        )
    if have is None:  # a workload without query rows
        return
    padded = -(-have // tile) * tile if isinstance(tile, int) and tile > 0 else have
    waste = 1 - have / padded
    if waste >= 0.25:
        heavy = busy is None or busy >= _LOW
        cost = "" if busy is None else f"; the tensor pipe is busy {busy:.0f} % of the time"
        yield Sign(
            "skinny product",
            "most of a product is for rows that do not exist",
            f"{have} query rows in tiles of {tile}: {100 * waste:.0f} % of the products are padding{cost}",
            82 if heavy and waste >= 0.5 else 38,
            settled=busy is not None,
        )
    elif busy is not None and useful and busy >= 30 and busy > 1.6 * useful:
        yield Sign(
            "useless products",
            "the tensor pipe does more than the work needs",
            f"it is busy {busy:.0f} % of the time for work that would take {useful:.0f} %: padding, masked tiles, or "
            "products made twice",
            78,
            settled=False,
        )


def balance(e: Evidence) -> Iterator[Sign]:
    waves, even = e.figures.get("waves"), e.figures.get("balance")
    if waves is not None and 0 < waves < 0.9:
        yield Sign(
            "part of a wave",
            "a part of the device has nothing to do",
            f"the grid is {waves:.2f} of a wave: {100 * (1 - waves):.0f} % of the places for blocks stay empty",
            85 if waves < 0.7 else 55,
        )
    elif waves is not None and 1 < waves < 5 and 0 < waves % 1 < 0.5:
        yield Sign(
            "tail",
            "the last wave is nearly empty",
            f"the grid is {waves:.2f} waves: the last one fills {100 * (waves % 1):.0f} % of the device, and the "
            f"whole is busy {100 * waves / (int(waves) + 1):.0f} % of its time at most",
            80,
        )
    if even is not None and even < 90:
        yield Sign(
            "imbalance",
            "some SMs work much longer than others",
            f"the average SM has work for {even:.0f} % of the time of the busiest: unequal parts",
            87,
        )
    if even is not None:
        return
    lengths = [n for n in getattr(e.problem, "seq_lens", ()) if n]
    if len(lengths) > 1 and max(lengths) > 1.25 * sum(lengths) / len(lengths):
        idle = e.figures.get("tensor", 0.0) < _BUSY and e.figures.get("dram", 0.0) < _BUSY
        share = e.share
        if (e.figures and idle) or (not e.figures and share is not None and share < 80):
            ratio = max(lengths) * len(lengths) / sum(lengths)
            yield Sign(
                "imbalance",
                "the requests are unequal, and the longest may hold all",
                f"the longest request is {ratio:.1f} times the mean: equal splits of them leave SMs idle; a new "
                "profile says how much",
                74,
                settled=False,
            )


def traffic(e: Evidence) -> Iterator[Sign]:
    moved, (_, least) = e.moved_mb, e.work
    if moved is not None and least and moved * 1e6 > _TRAFFIC * least:
        yield Sign(
            "traffic",
            "it moves more than it must",
            f"DRAM moved {moved:,.0f} MB, {moved * 1e6 / least:.2f} times the {least / 1e6:,.0f} MB of the inputs and "
            f"outputs; L2 hits: {e.figures.get('l2_hit', 0):.0f} %",
            77 if e.bound == "memory" or moved * 1e6 > 1.5 * least else 48,
        )


def waiting(e: Evidence) -> Iterator[Sign]:
    tensor = e.figures.get("tensor", 0.0)
    if not e.stalls or tensor >= 80:
        return
    barrier, arithmetic = e.stalls.get("barrier", 0.0), e.stalls.get("math_pipe_throttle", 0.0)
    if barrier >= 20:
        yield Sign(
            "barriers",
            "warps wait for each other at barriers",
            f"{barrier:.0f} % of warp time; with the tensor pipe at {tensor:.0f} % and "
            f"{e.figures.get('eligible', 0):.2f} eligible warps a cycle and scheduler, nothing fills the gap",
            66 if barrier >= 30 else 46,
        )
    issue = e.figures.get("issue", 0.0)
    if arithmetic >= 10 or issue >= 0.6:
        yield Sign(
            "arithmetic",
            "instructions outside of the tensor cores fill the schedulers",
            f"{issue:.2f} instructions a cycle and scheduler, {arithmetic:.0f} % of warp time waiting for a busy "
            "arithmetic pipe: softmax, masks, conversions",
            64,
        )
    name, share = max(e.stalls.items(), key=lambda row: row[1])
    if share >= 20 and name not in ("barrier", "long_scoreboard", "gmma", "not_selected"):
        yield Sign(
            f"stall {name}",
            f"warps wait for {STALLS.get(name, name)}",
            f"{name}, {share:.0f} % of warp time, more than for anything else",
            50,
        )


def power(e: Evidence) -> Iterator[Sign]:
    environment = (e.record or {}).get("environment") or {}
    limit, watts = environment.get("power_limit_w"), e.reading("power", "sustained")
    times = {time.state: time.us for time in e.times}
    ratio = times["sustained"] / times["burst"] if {"sustained", "burst"} <= times.keys() else None
    top = e.device.boost_mhz if e.device else None
    if limit and watts and watts >= 0.95 * limit:
        cool, hot = e.reading("clocks", "burst"), e.reading("clocks", "sustained")
        fell = f", and the SM clock falls from {cool:,.0f} to {hot:,.0f} MHz" if cool and hot else ""
        slower = f": sustained is {ratio:.2f} times burst" if ratio else ""
        yield Sign(
            "power",
            "on a hot chip it is held by power",
            f"{watts:,.0f} of {limit:,.0f} W{fell}{slower}; work that is no use costs time here",
            44 if ratio and ratio > 1.05 else 35,
        )
    clock = e.figures.get("clock")
    if clock and top and clock < _CLOCK * top:
        yield Sign(
            "clock",
            "the chip ran below its top clock",
            f"{clock:,.0f} MHz of {top:,} while it was counted: a warm or power-limited chip, on which a compute-bound "
            f"kernel takes up to {top / clock:.2f} times as long",
            30,
        )


def small(e: Evidence) -> Iterator[Sign]:
    host, share = (e.record or {}).get("host_us"), e.share
    burst = next((time.us for time in e.times if time.state in ("burst", "profiled")), None)
    if host and burst and host > burst:
        yield Sign(
            "host",
            "the host launches slower than the device works",
            f"a launch takes {host:.1f} us on the host and the call {burst:.1f} us: the device waits without a graph",
            68,
        )
    if burst is not None and burst < 25 and share is not None and share < 60:
        yield Sign(
            "small",
            "the call is so short that its beginning and its end decide",
            f"{burst:.1f} us: launch, first loads and the join of splits are most of it",
            70,
            settled=False,
        )


def remarks(e: Evidence) -> Iterator[Sign]:
    if e.share is not None and e.share > 103:
        yield Sign(
            "impossible",
            "it is faster than its limit",
            f"{e.share:.0f} % of a limit: the limit is not this machine's, or data came from a cache",
            95,
        )
    for warning in e.warnings:
        if not any(word in warning for word in ("spills", "serialises", "falls off")):
            yield Sign("binary", "the toolchain warns", warning, 36)


#: Every look at the evidence, in no order: `verdict.diagnose` sorts by weight.
SIGNS: tuple[Callable[[Evidence], Iterator[Sign]], ...] = (
    spills, pipelining, conflicts, rows, balance, traffic, waiting, power, small, remarks,
)  # fmt: skip
