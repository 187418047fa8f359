"""What the profilers print, read: CSV pages, NVIDIA's interface, traces, spans, stalls, findings."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import profiling_fakes as fakes
import pytest

from mla_var3.device import Device
from mla_var3.errors import UserError
from mla_var3.lab.profiling import sources
from mla_var3.lab.profiling.facts import Facts, against, findings
from mla_var3.lab.profiling.modes import ncu, nsys, spans, timeline
from mla_var3.lab.profiling.modes.counters import COUNTERS, Launch, main_launch
from mla_var3.lab.profiling.roofline import roofline

H200 = Device.get("h200")


# ---------------------------------------------------------------- ncu, CSV
def test_the_raw_page_gives_launches_in_units_of_the_house() -> None:
    main, short = ncu.parse_raw(fakes.raw_csv())
    assert (main.name, short.name) == ("flash_mla", "combine<512, 2>")
    figures = main.figures()
    assert figures["duration_us"] == pytest.approx(220.5)
    assert figures["clock"] == pytest.approx(1500)
    assert figures["dram_read"] == pytest.approx(900)
    assert figures["conflicts"] == pytest.approx(25) and figures["balance"] == pytest.approx(80)
    assert figures["tensor"] == 71.5 and figures["registers"] == 168
    assert short.figures() == {"duration_us": pytest.approx(4.0)}
    assert main_launch([short, main]) is main
    assert main.texts["Block Size"] == "(384, 1, 1)"


@pytest.mark.parametrize("unit, factor", [("us", 1.0), ("nsecond", 1e-3), ("ms", 1e3)])
def test_durations_keep_their_meaning_in_every_unit(unit: str, factor: float) -> None:
    name = "gpu__time_duration.sum"
    assert Launch("k", {name: 5.0}, {name: unit}).figures()["duration_us"] == pytest.approx(5.0 * factor)


def test_the_tensor_pipe_is_found_under_its_other_names() -> None:
    names = (
        "sm__pipe_tensor_cycles_active_v2.avg.pct_of_peak_sustained_elapsed",
        "sm__pipe_tensor_op_hmma_cycles_active.avg.pct_of_peak_sustained_active",
        "sm__inst_executed_pipe_tensor_op_gmma.avg.pct_of_peak_sustained_active",
    )
    for name in names:
        assert Launch("k", {name: 60.0}).figures() == {"tensor": 60.0}
    assert Launch("k", {"sm__inst_executed_pipe_tensor_op_gmma.sum": 60.0}).figures() == {}


def test_stalls_are_shares_without_what_is_counted_twice() -> None:
    main, short = ncu.parse_raw(fakes.raw_csv())
    assert main.stalls() == [("gmma", 60.0), ("long_scoreboard", 20.0), ("barrier", 10.0)]
    assert short.stalls() == []


@pytest.mark.parametrize("text", ["", "==ERROR== no\n", '"ID","Kernel Name"\n', '"x"\n"1"\n'])
def test_a_raw_page_without_kernels_is_no_launch(text: str) -> None:
    assert ncu.parse_raw(text) == []


def test_the_source_page_gives_the_hottest_instructions() -> None:
    first, second = ncu.parse_source(fakes.SOURCE_CSV)
    assert first.where.startswith("HGMMA.64x256x16") and first.samples == 120
    assert (first.stall, second.stall) == ("long_scoreboard", "wait")
    assert first.share == pytest.approx(100 * 120 / 180)
    assert ncu.parse_source("nothing") == []


def test_the_source_page_gives_the_hottest_lines_where_the_code_has_lines() -> None:
    """Compiled elsewhere: the texts are those of this package, and a wait's instructions come back to the wait."""
    name = "/elsewhere/src/mla_var3/kernel/cute_python/mla/flash_mla/flash_mla_v24/flash_mla_v24.py"
    texts = [text.strip() for text in sources.lines(name)]
    waits = 1 + texts.index("cute.arch.mbarrier_wait(self.full + place, parity)")
    code = 1 + texts.index("page = following")
    below = 1 + texts.index("# Of a last panel that is not full, what has columns: Q has none there.")
    wait, other, unknown = ncu.parse_source(fakes.lines_csv(code, below))
    assert (wait.where, wait.samples, wait.stall) == (f"flash_mla_v24.py:{waits}", 50, "long_scoreboard")
    assert wait.text == "cute.arch.mbarrier_wait(self.full + place, parity)"
    assert (other.where, other.text) == (f"flash_mla_v24.py:{code}", "page = following")
    assert (unknown.where, unknown.text, unknown.samples) == ("here.py:5", "", 3)
    assert wait.share == pytest.approx(100 * 50 / 60)


def test_lines_of_a_place_that_is_not_here_are_found_in_the_package(tmp_path: Path) -> None:
    own = Path(sources.__file__)
    assert sources.find("/elsewhere/src/mla_var3/lab/profiling/sources.py") == own
    assert sources.find(str(own)) == own
    assert sources.find("/elsewhere/lib/python3.9/site-packages/pytest/__init__.py") == Path(pytest.__file__)
    assert sources.find("/elsewhere/src/mla_var3/lab/profiling/gone.py") is None and sources.find("x.py") is None
    assert sources.lines("/elsewhere/src/mla_var3/lab/profiling/sources.py")[0].startswith('"""Source files that')
    assert sources.lines("/elsewhere/gone.py") == ()
    named = ["/a/mla_var3/kernel/cute_python/prims/paged.py", "/a/mla_var3/x/flash_mla/flash_mla.py", "/b/c.py"]
    assert [sources.short(name) for name in named] == ["prims/paged.py", "flash_mla.py", "c.py"]


def test_what_the_compiler_counts_as_lines_below_a_wait_is_put_back() -> None:
    texts = ["@cute.jit", "def f():", "    cute.arch.mbarrier_wait(a, 0)", "    b = 1", "", "    c = 2", "@cute.jit"]
    assert sources.place("f.py", 3, "SYNCS.PHASECHK.TRANS64 P0", texts) == (3, "cute.arch.mbarrier_wait(a, 0)")
    assert sources.place("f.py", 6, "SYNCS.PHASECHK.TRANS64 P0", texts)[0] == 3
    assert sources.place("f.py", 6, "IADD3 R0", texts) == (6, "c = 2")  # code, and no instruction of a wait
    assert sources.place("f.py", 5, "IADD3 R0", texts)[0] == 3
    assert sources.place("f.py", 7, "IADD3 R0", texts)[0] == 3
    assert sources.place("f.py", 1, "BRA", texts) == (1, sources.NO_LINE)
    assert sources.place("f.py", 9, "NOP", texts) == (9, "") and sources.place("gone.py", 3, "NOP") == (3, "")


# ---------------------------------------------------------------- ncu, NVIDIA's interface
class Metric:
    def __init__(self, value: Any, unit: str = "", instances: dict[int, int] | None = None) -> None:
        self._value, self._unit, self._instances = value, unit, instances or {}

    def value(self, index: int | None = None) -> Any:
        if self._value is None:
            raise RuntimeError("no value")
        return self._value if index is None else list(self._instances.values())[index]

    def unit(self) -> str:
        return self._unit

    def num_instances(self) -> int:
        return len(self._instances)

    def has_correlation_ids(self) -> bool:
        return bool(self._instances)

    def correlation_ids(self) -> Metric:
        return Metric(0, "", dict(enumerate(self._instances)))


class Info:
    def __init__(self, line: int) -> None:
        self._line = line

    def file_name(self) -> str:
        return "/src/flash_mla.py"

    def line(self) -> int:
        return self._line


class Action:
    metrics = {  # noqa: RUF012
        "gpu__time_duration.sum": Metric(100_000, "ns"),
        "device__attribute_display_name": Metric("NVIDIA H200"),
        "broken": Metric(None),
        "smsp__pcsamp_warps_issue_stalled_gmma": Metric(70, "", {0x10: 60, 0x20: 10}),
        "smsp__pcsamp_warps_issue_stalled_wait": Metric(30, "", {0x10: 5, 0x30: 25}),
        "smsp__pcsamp_warps_issue_stalled_wait_not_issued": Metric(30, "", {0x10: 30}),
    }

    def name(self) -> str:
        return "flash_mla"

    def metric_names(self) -> list[str]:
        return list(self.metrics)

    def metric_by_name(self, name: str) -> Metric:
        return self.metrics[name]

    def source_files(self) -> dict[str, str]:
        return {"/src/flash_mla.py": "a\n  dot(q, k)\n"}

    def source_info(self, address: int) -> Info | None:
        return Info(2) if address < 0x30 else None

    def sass_by_pc(self, address: int) -> str:
        return " BAR.SYNC "


class Interface:
    __file__ = "ncu_report.py"

    def __init__(self, actions: int = 1) -> None:
        self.actions = actions

    def load_report(self, path: str) -> Interface:
        return self

    def num_ranges(self) -> int:
        return 1

    def range_by_idx(self, index: int) -> Interface:
        return self

    def num_actions(self) -> int:
        return self.actions

    def action_by_idx(self, index: int) -> Action:
        return Action()


def test_nvidias_interface_gives_metrics_and_source_lines() -> None:
    (launch,) = ncu.from_interface(Interface(), Path("x.ncu-rep"))
    assert launch.figures()["duration_us"] == pytest.approx(100)
    assert launch.texts["device__attribute_display_name"] == "NVIDIA H200"
    first, second = launch.hot
    assert (first.where, first.text, first.samples, first.stall) == ("flash_mla.py:2", "dot(q, k)", 75, "gmma")
    assert (second.where, second.text, second.stall) == ("0x00030", "BAR.SYNC", "wait")


def test_a_report_the_interface_cannot_read_goes_through_csv(
    bin_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    exe = fakes.ncu(bin_dir)
    report = tmp_path / "a.ncu-rep"
    report.write_bytes(b"")
    launches, how = ncu.read(report, exe)
    assert len(launches) == 2 and "ncu-report is not installed (pip install ncu-report)" in how
    assert launches[0].hot and not launches[1].hot
    monkeypatch.setattr(ncu, "load_interface", lambda: Interface(0))
    assert "found no kernel" in ncu.read(report, exe)[1]
    monkeypatch.setattr(ncu, "load_interface", lambda: object())
    assert "could not read the report (AttributeError)" in ncu.read(report, exe)[1]
    monkeypatch.setattr(ncu, "load_interface", lambda: Interface())
    assert ncu.read(report, exe) == (
        ncu.from_interface(Interface(), report),
        "read with NVIDIA's ncu_report (ncu_report.py)",
    )


# ---------------------------------------------------------------- time axes
def test_a_trace_of_nsys_is_ordered_with_gaps_and_overlap() -> None:
    found = nsys.parse_trace(fakes.NSYS_CSV)
    assert [s.name for s in found] == ["flash_mla", "combine<512, 2>", "side"]
    assert [s.start_us for s in found] == [0, 210, 212]
    assert [p.gap_us for p in spans.place(found)] == [None, pytest.approx(10), pytest.approx(-2)]
    sums = spans.totals(found)
    assert (sums.count, sums.total_us, sums.busy_us, sums.overlap_us) == (3, 222, 212, 2)
    assert nsys.parse_trace("SKIPPED: no data\n") == []
    assert spans.totals([]).total_us == 0 and spans.place([]) == [] and spans.ordered([]) == []


def test_a_chrome_trace_gives_what_the_device_did(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    events = [
        {"ph": "X", "cat": "kernel", "name": "b", "ts": 130.0, "dur": 4.0, "args": {"stream": 7}},
        {"ph": "X", "cat": "kernel", "name": "a", "ts": 100.0, "dur": 25.0, "args": {"stream": 7}},
        {"ph": "X", "cat": "cpu_op", "name": "host", "ts": 90.0, "dur": 25.0},
        {"ph": "M", "name": "process_name"},
    ]
    path.write_text(json.dumps({"traceEvents": events}))
    assert timeline.read(path) == [spans.Span("a", 0, 25, "7"), spans.Span("b", 30, 4, "7")]
    path.write_text("[")
    with pytest.raises(UserError, match="is not a Chrome trace"):
        timeline.read(path)


# ---------------------------------------------------------------- conclusions
def test_the_roofline_says_where_its_ceilings_are_from() -> None:
    measured = roofline(10**12, 10**9, "bf16", H200)
    assert measured.bound == "compute" and "measured" in measured.source
    assert measured.limit_us == pytest.approx(1e12 / measured.tflops / 1e6) if measured.tflops else False
    assert measured.share(2 * (measured.limit_us or 0)) == pytest.approx(50)
    sheet = roofline(10**6, 10**9, "bf16", Device.get("a100"))
    assert sheet.bound == "memory" and "data sheet" in sheet.source
    unknown = roofline(1, 1, "int3", H200)
    assert unknown.limit_us is None and "no peak" in unknown.source and unknown.share(1.0) is None


def test_findings_carry_their_numbers() -> None:
    facts = Facts("a", {}, roofline(142 * 10**9, 637 * 10**6, "bf16", H200), launches=ncu.parse_raw(fakes.raw_csv()))
    text = "\n".join(findings(facts, H200))
    assert "compute-bound, at 79 % of the limit" in text
    assert "tensor pipe is active in 72 %" in text
    assert "warpgroup products (gmma, 60 %" in text
    assert "DRAM moved 916 MB, 1.44 times the 637 MB" in text
    assert "clock was 1,500 MHz of 1,980" in text
    fast = Facts("b", {}, roofline(10**12, 10**6, "bf16", H200), launches=facts.launches)
    assert "Over 100 %" in "\n".join(findings(fast, H200))
    idle = Facts("c", {}, facts.limit, spans=nsys.parse_trace(fakes.NSYS_CSV))
    assert "idle between kernels for 10.0 of 222.0 us" in "\n".join(findings(idle, H200))
    (line,) = against(facts, Facts("b", {}, facts.limit, launches=facts.launches, calls=2))
    assert "100.0 % slower than the baseline (ratio 2.000)" in line


def test_every_counter_has_a_title_and_a_valid_pattern() -> None:
    assert len({c.key for c in COUNTERS}) == len({c.title for c in COUNTERS}) == len(COUNTERS)
