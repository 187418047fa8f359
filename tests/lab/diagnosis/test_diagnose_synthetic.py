"""The verdict on SYNTHETIC kernels, whose bottleneck is known because their counters were made up for it."""

from __future__ import annotations

from typing import Any

import pytest
from diagnosis_fakes import FEW, KERNEL, evidence, record

from mla_var3.cli.diagnose import lines
from mla_var3.lab.diagnosis import signs
from mla_var3.lab.diagnosis.verdict import REASON, Diagnosis, command, diagnose
from mla_var3.toolchain.spills import Spill
from mla_var3.workload.decode import MlaProblem
from mla_var3.workload.mixed import MixedProblem


def paths(found: Any) -> list[str]:
    return [str(one.entry["path"]) for one in found]


def first(d: Diagnosis) -> signs.Sign:
    return d.signs[0]


def test_a_spilling_kernel() -> None:
    d = diagnose(
        evidence(
            time_us=520.0,
            figures={"tensor": 36.0, "dram": 26.0, "l2": 41.0},
            stalls={"long_scoreboard": 34.0, "lg_throttle": 14.0},
            resources={"registers": 168, "spill_bytes": 1808, "spill_loop_bytes": 1600, "stack_bytes": 904},
            instructions={"STL": 226, "LDL": 226},
        )
    )
    assert d.kind == "latency" and d.measured
    assert first(d).key == "spills" and first(d).settled
    assert "1,808 bytes" in first(d).text and "226 STL" in first(d).text and "48 %" in first(d).text
    assert d.reason.startswith("latency-bound: it spills registers")
    assert {"anti-patterns/register-ceiling.md", "anti-patterns/carried-over-tiles.md"} <= set(paths(d.anti_patterns))
    assert "optimizations/two-warpgroup-output.md" in paths(d.optimizations)


SPILLING: dict[str, Any] = {"registers": 168, "spill_bytes": 140, "stack_bytes": 24}
REGISTERS = {"anti-patterns/register-ceiling.md", "anti-patterns/carried-over-tiles.md"}


def test_spills_outside_of_the_loop_of_products_are_a_remark_and_no_reason() -> None:
    stalls = {"long_scoreboard": 37.0, "lg_throttle": 5.0}
    inside = diagnose(evidence(stalls=stalls, resources={**SPILLING, "spill_loop_bytes": 140}))
    assert first(inside).key == "spills" and first(inside).settled
    assert "140 bytes of it in the loop of products; warps wait 42 %" in first(inside).text
    assert set(paths(inside.anti_patterns)) >= REGISTERS
    assert "optimizations/two-warpgroup-output.md" in paths(inside.optimizations)
    outside = diagnose(evidence(stalls=stalls, resources={**SPILLING, "spill_loop_bytes": 0}))
    assert "spills" not in outside.reason
    (sign,) = (s for s in outside.signs if "spill" in s.key)
    assert sign.key == "spills outside" and "none of them in the loop of products" in sign.text
    assert "42 %" not in sign.text and sign.weight < REASON and outside.signs[-1] == sign
    assert not REGISTERS & set(paths(outside.anti_patterns))
    assert "optimizations/two-warpgroup-output.md" not in paths(outside.optimizations)


def test_where_an_older_record_spills_is_asked_for_until_it_is_located() -> None:
    e = evidence(resources=SPILLING)
    d = diagnose(e)
    assert next(s for s in d.signs if s.key == "spills").settled is False
    assert any(line.startswith("where it spills, in the loop of products or not: mla-var3 diagnose") for line in d.open)
    e.spills = (Spill(0x10, True, 136, "around"), Spill(0x20, False, 4, "loop"))
    d = diagnose(e)
    assert "4 bytes of it in the loop of products" in next(s for s in d.signs if s.key == "spills").text
    assert not any(line.startswith("where it spills") for line in d.open)


def test_techniques_that_a_version_states_to_have_are_not_suggested_to_it() -> None:
    slow: dict[str, Any] = {"time_us": 320.0, "figures": {"tensor": 60.0, "l2_hit": 14.0}}
    plain, with_them = diagnose(evidence(**slow)), diagnose(evidence(kernel=KERNEL, **slow))
    assert with_them.evidence.uses and not plain.evidence.uses
    stated = {f"optimizations/{name}.md" for name in with_them.evidence.uses}
    assert {"optimizations/seesaw-schedule.md", "optimizations/clusters-multicast.md"} <= set(
        paths(plain.optimizations)
    )
    assert not stated & set(paths(with_them.optimizations))
    assert set(paths(with_them.optimizations)) == set(paths(plain.optimizations)) - stated
    # Anti-patterns are no techniques: they stay.
    assert paths(with_them.anti_patterns) == paths(plain.anti_patterns)
    said = "\n".join(lines(with_them))
    assert "It states that it has: clusters-multicast," in said and "It states" not in "\n".join(lines(plain))


@pytest.mark.parametrize(
    ("changes", "said", "settled"),
    [
        ({"tiling": {"num_pipeline_stages": 1}}, "one pipeline stage", True),
        ({"instructions": {"UTMALDG": 0, "LDG": 90}}, "no asynchronous copy", True),
        ({}, "producer warps that wait for room", False),
    ],
)
def test_a_kernel_without_pipelining(changes: dict[str, Any], said: str, settled: bool) -> None:
    d = diagnose(
        evidence(
            time_us=700.0,
            figures={"tensor": 27.0, "dram": 20.0, "l2": 30.0, "eligible": 0.12, "issue": 0.1},
            stalls={"long_scoreboard": 61.0, "gmma": 3.0},
            **changes,
        )
    )
    assert d.kind == "latency"
    assert first(d).key == "no pipelining" and first(d).settled is settled and said in first(d).text
    assert "61 %" in first(d).text


def test_products_that_the_compiler_serialises() -> None:
    d = diagnose(evidence(figures={"tensor": 38.0}, stalls={"gmma": 41.0}, instructions={"WARPGROUP": 352}))
    assert first(d).key == "serial products" and "352 WARPGROUP instructions for 176 products" in first(d).text
    assert {"serial products", "waits for products"} <= {s.key for s in d.signs}
    assert "anti-patterns/silent-fallback.md" in paths(d.anti_patterns)


BAD_LAYOUT: dict[str, Any] = {
    "time_us": 610.0,
    "figures": {"tensor": 31.0, "dram": 23.0, "l2": 33.0, "l1": 77.0},
    "stalls": {"short_scoreboard": 26.0, "mio_throttle": 19.0, "long_scoreboard": 15.0},
}


def with_figures(case: dict[str, Any], **figures: float) -> dict[str, Any]:
    return {**case, "figures": {**case["figures"], **figures}}


def test_bank_conflicts_are_suspected_from_stalls_and_settled_when_they_are_counted() -> None:
    suspected = diagnose(evidence(**BAD_LAYOUT))
    assert first(suspected).key == "bank conflicts" and not first(suspected).settled
    assert "45 % of their time" in first(suspected).text and "a new profile" in first(suspected).text
    settled = diagnose(evidence(**with_figures(BAD_LAYOUT, conflicts=75.0)))
    assert first(settled).key == "bank conflicts" and first(settled).settled and "75 %" in first(settled).text
    none = diagnose(evidence(**with_figures(BAD_LAYOUT, conflicts=1.0)))
    assert "bank conflicts" not in {s.key for s in none.signs}


def test_shared_memory_at_its_limit_is_a_memory_bound() -> None:
    d = diagnose(evidence(figures={"tensor": 41.0, "l1": 93.0}, stalls={"mio_throttle": 40.0}))
    assert d.kind == "memory" and "L1 and shared memory is busy 93 %" in d.because


def test_a_skinny_product() -> None:
    busy = {"tensor": 68.0, "dram": 57.0, "l2": 48.0, "l2_hit": 3.0}
    d = diagnose(evidence(FEW, time_us=232.0, figures=busy, stalls={"gmma": 31.0}))
    assert d.evidence.bound == "memory" and d.kind == "compute"
    assert first(d).key == "skinny product" and "8 query rows in tiles of 64: 88 %" in first(d).text
    assert "68 % of the time" in first(d).text
    assert "optimizations/swapped-operands.md" in paths(d.optimizations)
    idle = diagnose(evidence(FEW, time_us=150.0, figures={"tensor": 22.0, "dram": 88.0}))
    assert idle.kind == "memory" and next(s for s in idle.signs if s.key == "skinny product").weight < 40


def test_products_off_the_fast_path() -> None:
    d = diagnose(evidence(FEW, time_us=330.0, tiling={"tile_m": 16}, instructions={"HGMMA": 0, "HMMA": 512}))
    assert first(d).key == "slow products" and "512 HMMA" in first(d).text
    assert "anti-patterns/sub-16-mma.md" in paths(d.anti_patterns)


RAGGED = MlaProblem(b=64, h=128, t=16384, lengths={"name": "ragged", "seed": 1})


def test_an_unbalanced_split() -> None:
    idle = {"tensor": 41.0, "dram": 31.0, "l2": 40.0, "waves": 1.0}
    suspected = diagnose(evidence(RAGGED, time_us=500.0, figures=idle))
    assert first(suspected).key == "imbalance" and not first(suspected).settled
    assert "times the mean" in first(suspected).text
    assert "anti-patterns/equal-splits.md" in paths(suspected.anti_patterns)
    settled = diagnose(evidence(RAGGED, time_us=500.0, figures={**idle, "balance": 55.0}))
    assert first(settled).key == "imbalance" and first(settled).settled and "55 % of the time" in first(settled).text
    even = diagnose(evidence(RAGGED, time_us=500.0, figures={**idle, "balance": 97.0}))
    assert "imbalance" not in {s.key for s in even.signs}


@pytest.mark.parametrize(
    ("waves", "key", "said"),
    [(0.24, "part of a wave", "76 % of the places"), (1.06, "tail", "fills 6 %"), (1.94, None, ""), (9.2, None, "")],
)
def test_waves(waves: float, key: str | None, said: str) -> None:
    d = diagnose(evidence(figures={"waves": waves}))
    found = [s for s in d.signs if s.key in ("part of a wave", "tail")]
    assert [s.key for s in found] == ([key] if key else [])
    assert all(said in s.text for s in found)


def test_a_kernel_at_its_limit_is_not_slow() -> None:
    d = diagnose(evidence(time_us=196.0, figures={"tensor": 88.0, "dram": 64.0}, stalls={"gmma": 38.0}))
    assert d.kind == "compute" and "the tensor pipe is busy 88 %" in d.because
    assert d.reason == "compute-bound, and close to it: 93 % of the limit."


def test_power_and_clock() -> None:
    environment = {
        "power_limit_w": 700.0,
        "power": {"burst": 390.0, "sustained": 694.0},
        "clocks": {"burst": {"sm_mhz": 1965.0}, "sustained": {"sm_mhz": 1485.0}},
    }
    d = diagnose(evidence(record=record(environment=environment), figures={"clock": 1560.0}))
    power, clock = (next(s for s in d.signs if s.key == key) for key in ("power", "clock"))
    assert "694 of 700 W" in power.text and "1,965 to 1,485 MHz" in power.text and "1.17 times burst" in power.text
    assert "1,560 MHz of 1,980" in clock.text
    assert "optimizations/power-aware-tiling.md" in paths(d.optimizations)


def test_traffic_that_need_not_be() -> None:
    d = diagnose(evidence(FEW, time_us=260.0, figures={"tensor": 20.0, "dram": 91.0, "dram_read": 1190.0}))
    assert d.kind == "memory"
    assert next(s for s in d.signs if s.key == "traffic").text.startswith("DRAM moved 1,193 MB, 1.9")


def test_the_command_names_the_problem() -> None:
    assert command(evidence(FEW, kernel=KERNEL)) == "cute-dsl/flash_mla_v23 --b 128 --h 8"
    assert "--lengths ragged:1" in command(evidence(RAGGED)) and "--t 16384" in command(evidence(RAGGED))
    listed = MlaProblem(t=[3, 70], causal=True, page=None)  # type: ignore[arg-type]
    assert command(evidence(listed)).endswith("--b 2 --t 70 --causal --page contiguous --lengths 3,70")
    assert "--n 512" in command(evidence(MixedProblem(b=4, h=16, t=4096, n=512)))
