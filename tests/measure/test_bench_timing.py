"""The order of timing, on a simulated chip that heats up and cools down."""

from __future__ import annotations

import dataclasses
import re
import time
from typing import Any

import pytest
from bench_fakes import SimulatedBackend

from mla_var3.errors import UserError
from mla_var3.measure import timing
from mla_var3.measure.calibrate import LimitItems, Limits, measure_all
from mla_var3.measure.settings import BenchSettings, from_record
from mla_var3.measure.timing import percentile, plan_sets, prepare, take_turns
from mla_var3.workload import Cost, Rows
from mla_var3.workload.decode import MlaProblem

SETTINGS = BenchSettings()


def nobody(*_: Any) -> None: ...


def fail(item: Any, error: Exception) -> None:
    raise error


def test_percentiles_interpolate() -> None:
    assert percentile([4, 1, 3, 2], 0.5) == 2.5
    assert percentile([7], 0.9) == 7
    assert timing.stats([1.0, 2.0, 3.0, 4.0, 5.0]) == {"median": 3.0, "p10": 1.4, "p90": 4.6, "n": 5}


def test_a_graph_holds_whole_rotations_over_all_sets() -> None:
    chip = SimulatedBackend()
    item = prepare(chip, "k", [chip.call(200.0)] * 3, SETTINGS)
    assert ("capture", 3, 7, False) in chip.log  # 7 rotations of 0.6 ms come nearest to 4 ms
    assert item.calls == 21 and item.overlap_us == 0
    long = prepare(chip, "k", [chip.call(9000.0)] * 2, SETTINGS)
    assert long.calls == 2
    many = prepare(chip, "k", [chip.call(0.5)] * 512, SETTINGS)
    assert many.calls <= timing.MAX_GRAPH_CALLS


def test_calls_that_overlap_are_taken_apart() -> None:
    chip = SimulatedBackend()
    item = prepare(chip, "k", [chip.call(100.0, overlap=4.0)] * 2, SETTINGS)
    assert item.overlap_us == pytest.approx(4.0, abs=0.5) and item.gap_us == pytest.approx(1.5, abs=0.1)
    timing.take_apart(chip, [item], item.gap_us)
    take_turns(chip, [item], SETTINGS, nobody, fail)
    assert item.stats()["burst"]["median"] == pytest.approx(100.0, rel=0.02)
    assert "calls overlapped by 4.0 us" in timing.method_text(item, 2, 1, SETTINGS, graph=True, clock="c")
    blind = prepare(chip, "k", [chip.call(100.0, overlap=4.0)] * 2, dataclasses.replace(SETTINGS, overlap_probe=False))
    assert blind.overlap_us == 0


def test_contenders_taken_apart_have_one_gap() -> None:
    """A gap that was measured beside something else is not a contender's own."""
    chip = SimulatedBackend()
    items = [prepare(chip, name, [chip.call(us, overlap=2.0)] * 2, SETTINGS) for name, us in (("a", 50.0), ("b", 20.0))]
    items[0].gap_us = 4.0
    timing.take_apart(chip, items, 1.5)
    take_turns(chip, items, SETTINGS, nobody, fail)
    assert [item.stats()["burst"]["median"] for item in items] == [pytest.approx(us, rel=0.02) for us in (50.0, 20.0)]


def test_what_a_graph_costs_hides_no_overlap() -> None:
    """With few calls in a graph its own cost would be a large part of each, of the separators' too."""
    chip = SimulatedBackend()
    chip.graph_us = 6.0
    item = prepare(chip, "k", [chip.call(100.0, overlap=4.0)] * 2, SETTINGS)
    assert item.overlap_us == pytest.approx(4.0, abs=0.2) and item.gap_us == pytest.approx(1.5, abs=0.1)


def test_burst_is_cool_and_sustained_is_hot() -> None:
    chip = SimulatedBackend()
    items = [prepare(chip, name, [chip.call(us)] * 2, SETTINGS) for name, us in (("a", 200.0), ("b", 100.0))]
    take_turns(chip, items, SETTINGS, nobody, fail)
    for item, cold in zip(items, (200.0, 100.0), strict=True):
        found = item.stats()
        assert found["burst"]["median"] == pytest.approx(cold, rel=0.001)
        assert found["burst"]["n"] == SETTINGS.burst_rounds
        assert found["sustained"]["p10"] == found["sustained"]["median"] == pytest.approx(cold * 1.25)
        assert item.sensors()["burst"]["sm_mhz"] > item.sensors()["sustained"]["sm_mhz"] == 1500.0


def test_every_burst_turn_follows_an_idle_gap() -> None:
    chip = SimulatedBackend()
    items = [prepare(chip, "a", [chip.call(200.0)], SETTINGS), prepare(chip, "b", [chip.call(100.0)], SETTINGS)]
    chip.log.clear()
    take_turns(chip, items, dataclasses.replace(SETTINGS, sustained_rounds=0), nobody, fail)
    kinds = [entry[0] for entry in chip.log]
    assert kinds == ["idle", "start"] * (2 * SETTINGS.burst_rounds)
    assert all(entry[1] == 0.03 for entry in chip.log if entry[0] == "idle")
    assert all(entry[2:] == (4, 0.0) for entry in chip.log if entry[0] == "start")


def test_the_second_half_in_time_is_used() -> None:
    class Warming(SimulatedBackend):
        def start(self, replay: Any, count: int) -> Any:
            pending = super().start(replay, count)
            pending.taken = [100.0] * (count // 2) + [300.0] * (count - count // 2)
            return pending

    chip = Warming()
    item = timing.Item("k", chip.capture([chip.call(100.0)], 1), 1, 100.0)
    timing.sustained_turn(chip, item, dataclasses.replace(SETTINGS, sustained_s=1e-3))
    # Ten replays of 100 and 300 us: half of the time has passed within the second of the slow ones.
    assert set(item.samples["sustained"]) == {300.0} and len(item.samples["sustained"]) == 3


def test_every_other_round_is_reversed() -> None:
    chip = SimulatedBackend()
    items = [prepare(chip, name, [chip.call(100.0)], SETTINGS) for name in "abc"]
    order: dict[tuple[str, int], list[str]] = {}
    twice = dataclasses.replace(SETTINGS, sustained_rounds=2)
    take_turns(chip, items, twice, lambda i, s, n: order.setdefault((s, n), []).append(i.name), fail)
    assert list(order) == [("burst", n) for n in range(5)] + [("sustained", n) for n in range(2)]
    assert all(names == (list("cba") if n % 2 else list("abc")) for (_, n), names in order.items())


def test_the_limits_stand_behind_the_contenders_and_the_first_of_those_behind_itself() -> None:
    chip = SimulatedBackend()
    both = LimitItems(chip, SETTINGS)
    contenders = [prepare(chip, name, [chip.call(100.0)], SETTINGS) for name in "ab"]
    turns: dict[tuple[str, int], list[str]] = {}
    settings = dataclasses.replace(SETTINGS, burst_rounds=1, sustained_rounds=2)
    order = lambda i, s, n: turns.setdefault((s, n), []).append(i.name)  # noqa: E731
    items = [*both.items, *contenders]
    take_turns(chip, items, settings, order, fail)
    matmul, read = (item.name for item in both.items)
    assert turns["burst", 0] == [matmul, read, "a", "b"]
    assert turns["sustained", 0] == ["a", "b", matmul, read] and turns["sustained", 1] == ["b", "a", read, matmul]

    chip.log.clear()
    take_turns(chip, items, dataclasses.replace(settings, burst_rounds=0, sustained_rounds=1), order, fail)
    starts = [entry for entry in chip.log if entry[0] == "start"]
    assert len(starts) == 5 and starts[0][1] == starts[1][1]  # the first contender is at work before its own turn
    assert starts[0][2] == pytest.approx(settings.settle_s / settings.sustained_s * starts[1][2], abs=4)
    assert all(start[3] == 1.0 for start in starts[1:])  # a hot chip, for every turn
    assert all(len(item.samples["sustained"]) > 1 for item in items)


def test_every_sustained_turn_may_stand_behind_a_rest() -> None:
    chip = SimulatedBackend()
    both = LimitItems(chip, SETTINGS)
    contenders = [prepare(chip, name, [chip.call(100.0)], SETTINGS) for name in "ab"]
    settings = dataclasses.replace(SETTINGS, burst_rounds=1, rest_s=0.7)
    chip.log.clear()
    take_turns(chip, [*both.items, *contenders], settings, nobody, fail)
    log = [entry for entry in chip.log if entry[0] == "start" or entry[1] == 0.7]
    sustained = log[4:]  # behind a burst turn of each
    assert [entry[0] for entry in sustained] == ["idle", "start"] * 4
    assert [entry[1] for entry in sustained[1::2]] == [item.replay for item in (*contenders, *both.items)]
    assert all(entry[3] == 0.0 for entry in sustained[1::2])  # a cool chip, each time
    words = timing.method_text(contenders[0], 1, 1, settings, graph=True, clock="")
    assert "each behind 0.7 s of rest" in words and "not kept" not in words
    assert "behind 1.6 s of its replays that are not kept" in timing.method_text(
        contenders[0], 1, 1, SETTINGS, graph=True, clock=""
    )


def test_the_host_s_time_is_the_best_batch_s(monkeypatch: pytest.MonkeyPatch) -> None:
    took = [9.0] * timing.HOST_QUEUE + [4.0] * timing.HOST_QUEUE + [6.0] * 10
    clock, times = [0], iter(took)
    monkeypatch.setattr(time, "perf_counter_ns", lambda: clock[0])
    waits: list[int] = []
    chip = SimulatedBackend()
    monkeypatch.setattr(chip, "synchronize", lambda: waits.append(clock[0]))

    def call() -> None:
        clock[0] += round(1e3 * next(times))

    assert timing.host_us(chip, call, len(took)) == 4.0
    assert len(waits) == 4 and next(times, None) is None


def test_an_item_that_raises_has_no_further_turn_and_no_time() -> None:
    chip = SimulatedBackend()
    items = [prepare(chip, name, [chip.call(100.0)], SETTINGS) for name in "abc"]
    bad, starts = items[1], []
    real = chip.start

    def start(replay: Any, count: int) -> Any:
        if replay is bad.replay:
            starts.append(count)
            if len(starts) == 2:
                raise RuntimeError("launch failed")
        return real(replay, count)

    chip.start = start  # type: ignore[method-assign]
    failures: list[tuple[str, str]] = []
    live = take_turns(chip, items, SETTINGS, nobody, lambda i, e: failures.append((i.name, str(e))))
    assert [i.name for i in live] == ["a", "c"] and failures == [("b", "launch failed")]
    assert len(starts) == 2 and not bad.stats()


def test_limits_are_measured_in_the_same_states() -> None:
    chip = SimulatedBackend()
    both = LimitItems(chip, SETTINGS)
    take_turns(chip, both.items, SETTINGS, nobody, fail)
    burst, hot = both.limits("burst"), both.limits("sustained")
    assert burst is not None and hot is not None
    assert burst.matmul_tflops == pytest.approx(2 * 8192**3 / 1400e-6 / 1e12, rel=1e-4)
    assert burst.read_gbps == pytest.approx(2**31 / 463e-6 / 1e9, rel=1e-4)
    assert hot.matmul_tflops == pytest.approx(burst.matmul_tflops / 1.25, rel=1e-4)
    record = both.to_record(Cost(10**11, 10**6))
    assert record["bound"] == "compute" and set(record["burst"]) == {"matmul_tflops", "read_gbps", "limit_us"}
    assert record["sustained"]["limit_us"] == pytest.approx(record["burst"]["limit_us"] * 1.25, rel=1e-3)
    both.reset()
    assert both.limits("burst") is None and both.to_record(Cost(1, 1)) == {}


def test_the_limit_is_the_larger_time() -> None:
    limits = Limits(matmul_tflops=803.0, read_gbps=4640.0)
    # The published cell b = 128, s = 1, h = 128, t = 4096: 181.9 us, compute; with 16 heads 131.1 us, memory.
    for h, us, bound in ((128, 181.9, "compute"), (16, 131.1, "memory")):
        cost = MlaProblem(b=128, h=h).cost()
        assert limits.limit_us(cost) == pytest.approx(us, abs=0.1)
        assert limits.bound(cost) == bound


def test_what_is_written_is_charged_at_the_rate_of_a_copy() -> None:
    chip = SimulatedBackend()
    half = Cost(1, 2 << 30, written=1 << 30)
    three = LimitItems(chip, SETTINGS, [half])
    take_turns(chip, three.items, SETTINGS, nobody, fail)
    burst = three.limits("burst")
    assert burst is not None and burst.copy_gbps == pytest.approx(2**31 / 504e-6 / 1e9, rel=1e-4)
    assert burst.limit_us(Cost(0, 2 << 30, written=1 << 30)) == pytest.approx(504, rel=1e-4)
    # Three reads and a write: half of the bytes are copied, and half are read.
    assert burst.limit_us(Cost(0, 2 << 30, written=1 << 29)) == pytest.approx(504 / 2 + 463 / 2, rel=1e-4)
    assert burst.limit_us(Cost(0, 2 << 30)) == pytest.approx(463, rel=1e-4)
    record = three.to_record(half)["burst"]
    assert record["limit_us"] == pytest.approx(504, rel=1e-4) and record["copy_gbps"] == burst.copy_gbps
    words = timing.method_text(three.items[0], 1, 1, SETTINGS, graph=True, clock="", limits=three.words)
    assert "reads 2 GiB, one that copies 1 GiB" in words


def test_rows_with_gaps_are_charged_at_the_rate_of_a_copy_of_such_rows() -> None:
    chip = SimulatedBackend()
    rows = Rows(1 << 29, 128, 1152)
    apart = Cost(1, 2 << 30, written=1 << 30, rows=rows)
    further = dataclasses.replace(apart, rows=rows._replace(pitch=1280))
    five = LimitItems(chip, SETTINGS, [Cost(1, 2 << 30), apart, further])
    take_turns(chip, five.items, SETTINGS, nobody, fail)
    burst = five.limits("burst", rows)
    assert burst is not None and burst.rows_gbps == pytest.approx(2**31 / 580e-6 / 1e9, rel=1e-4)
    # Half of what is written is in such rows, and the other half in order.
    record = five.to_record(apart)["burst"]
    assert record["limit_us"] == pytest.approx(580 / 2 + 504 / 2, rel=1e-4)
    assert record["rows_gbps"] == burst.rows_gbps
    assert "copies rows of 128 bytes to every 1152 bytes" in five.words
    assert five.to_record(further)["burst"]["limit_us"] == pytest.approx(600 / 2 + 504 / 2, rel=1e-4)
    # Rows of another pitch were not measured: they count as bytes in order, which is the shorter time.
    other = dataclasses.replace(apart, rows=rows._replace(pitch=640))
    assert five.to_record(other)["burst"]["limit_us"] == pytest.approx(504, rel=1e-4)


def test_one_state_alone() -> None:
    chip = SimulatedBackend()
    assert set(measure_all(dataclasses.replace(SETTINGS, burst_rounds=0), chip)) == {"sustained"}
    found = measure_all(dataclasses.replace(SETTINGS, sustained_rounds=0), SimulatedBackend())
    assert set(found) == {"burst"} and found["burst"].read_gbps == pytest.approx(4638, rel=1e-3)


def test_input_sets_are_cold_and_fit() -> None:
    h200 = 141e9
    large = plan_sets(MlaProblem(b=128), 3, h200, SETTINGS)
    assert large.count == 2 and large.set_bytes > 256e6
    small = plan_sets(MlaProblem(b=1, h=16, t=4096), 3, h200, SETTINGS)
    assert small.count * small.set_bytes >= 256e6 and small.count < 64
    assert plan_sets(MlaProblem(b=1, h=1, t=64), 3, h200, SETTINGS).count == SETTINGS.max_sets
    # Of unequal lengths, it is what calls read that must be more than the L2 holds, not what lies there.
    lengths = {"name": "one_long", "seed": 1}
    ragged = plan_sets(MlaProblem(b=64, h=16, t=32768, lengths=lengths), 2, h200, SETTINGS)
    assert ragged.count * MlaProblem(b=64, h=16, t=32768, lengths=lengths).cost().bytes >= 256e6
    single = plan_sets(MlaProblem(b=1024, h=16, t=65536), 1, h200, SETTINGS)
    assert single.count == 1 and single.need_bytes > 77e9 and not single.reason
    none = plan_sets(MlaProblem(b=4096, t=65536), 2, h200, SETTINGS)
    assert none.count == 0 and "GB" in none.reason and "141.0 GB" in none.reason


def test_settings_say_what_is_wrong() -> None:
    assert from_record(SETTINGS.to_record()) == SETTINGS
    assert BenchSettings.of({"preset": "fast", "burst_rounds": 4}) == BenchSettings.fast(burst_rounds=4)
    assert BenchSettings.fast().burst_rounds == 3
    with pytest.raises(UserError, match="did you mean 'burst_rounds'"):
        BenchSettings.of({"burst_round": 1})
    with pytest.raises(UserError, match="did you mean 'fast'"):
        BenchSettings.of({"preset": "fats"})
    with pytest.raises(UserError, match="too small"):
        BenchSettings(burst_rounds=-1)
    with pytest.raises(UserError, match="leave out burst and sustained"):
        BenchSettings(burst_rounds=0, sustained_rounds=0)
    with pytest.raises(UserError, match="mode 'tim' is unknown"):
        BenchSettings(mode="tim")
    assert BenchSettings(worker_env={"A": 1}).worker_env == (("A", "1"),)  # type: ignore[arg-type]
    assert BenchSettings(tune_budget_s=5000.0).limit_s("tune") == 5120.0


@pytest.mark.parametrize(
    ("name", "value", "wanted"),
    [
        ("commit", 4390220, "text: '\"4390220\"' on a command line"),
        ("burst_rounds", "three", "a whole number"),
        ("burst_rounds", 1.5, "a whole number"),
        ("burst_rounds", True, "a whole number"),
        ("sustained_s", "1 s", "a number"),
        ("overlap_probe", 1, "true or false"),
    ],
)
def test_a_setting_of_another_type_is_refused(name: str, value: Any, wanted: str) -> None:
    with pytest.raises(UserError, match=re.escape(f"bench setting {name} = {value!r} is not right: give {wanted}.")):
        BenchSettings.of({name: value})
    assert BenchSettings(sustained_s=1).sustained_s == 1  # a whole number is a number


# ---------------------------------------------------------------- where the time of a call goes
def test_a_call_is_divided_at_the_ends_of_its_kernels() -> None:
    """The second kernel begins before the first one ends, as a programmatic dependent does: its part is what it takes
    after that. What lies between replays is in no median."""
    kernels, at = [], 0.0
    for call in range(7):
        at += 100.0 if call in (0, 3) else 1.0
        for name, us in (("norm", 2.0), ("product", 5.0), ("norm", 3.0)):
            at += us
            kernels.append((name, at))
    assert timing.divided(kernels[::-1], 7) == [("norm", 3.0), ("product", 5.0), ("norm", 3.0)]
    assert timing.divided(kernels[:-1], 7) == [], "a kernel is missing"
    assert timing.divided(kernels, 1) == [] and timing.divided([], 7) == []
    kernels[4] = ("other", kernels[4][1])
    assert timing.divided(kernels, 7) == [], "calls differ"
