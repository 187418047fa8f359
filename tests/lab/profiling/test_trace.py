"""The timeline inside a kernel: from time stamps to shares, a picture, and Chrome's JSON."""

from __future__ import annotations

import itertools
import json
import re
import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import traced_call
from traced_call import CAPACITY, CONSUMER, EVENTS, call

from mla_var3 import cli
from mla_var3.catalogue import registry
from mla_var3.catalogue.registry import KernelId
from mla_var3.device import Device
from mla_var3.errors import UserError
from mla_var3.lab.profiling import picture, run
from mla_var3.lab.profiling.facts import Facts
from mla_var3.lab.profiling.modes import trace
from mla_var3.lab.profiling.modes.trace import Cta, Trace, Warp, decode
from mla_var3.lab.profiling.report import render
from mla_var3.lab.profiling.request import Request
from mla_var3.lab.profiling.roofline import roofline
from mla_var3.toolchain.cute_trace import HEADER, WAIT
from mla_var3.workload.decode import MlaProblem

H200 = Device.get("h200")
V23 = KernelId("cute-dsl", "mla", "flash_mla", 23)
NEAR = 0.05  # us: what is left of the global timer's steps


@pytest.fixture
def traced() -> Trace:
    return replace(decode(call(), EVENTS, CAPACITY), plain_us=12.5, traced_us=15.0)


# ---------------------------------------------------------------- time stamps
def test_clocks_of_all_sms_come_to_one_axis(traced: Trace) -> None:
    assert traced.kernels == ["flash", "combine"] and traced.main == "flash"
    assert traced.step_ns == 32 and not any("moves in steps" in text for text in traced.sentences())
    assert any("moves in steps of 1,024 ns" in text for text in replace(traced, step_ns=1024).sentences())
    assert traced.cycles == pytest.approx(traced_call.CYCLES, rel=0.01)
    found = [(cta.kernel, cta.number, cta.sm, cta.begin, cta.end) for cta in traced.ctas]
    wanted = [("flash", 0, 0, 0, 10), ("flash", 1, 1, 3, 13), ("combine", 0, 0, 15, 16)]
    assert [one[:3] for one in found] == [one[:3] for one in wanted]
    for one, other in zip(found, wanted, strict=True):
        assert one[3:] == pytest.approx(other[3:], abs=NEAR)


def test_a_warp_has_its_functions_and_waits(traced: Trace) -> None:
    warp = traced.ctas[1].warps[4]
    assert warp.role == "consume" and traced.ctas[1].warps[0].role == "load"
    found = [(step.event.name, step.depth) for step in warp.steps]
    assert found == [("consume", 0), ("step", 1), ("wait full", 2), ("wait products", 2), ("wait products", 2)]
    times = [(step.begin, step.end, step.own_us) for step in warp.steps]
    wanted = [(4, 12, 2), (5, 11, 2), (5, 7, 2), (8, 9, 1), (9, 10, 1)]
    assert np.array(times) == pytest.approx(np.array(wanted), abs=NEAR)
    # From the first group that is issued until the wait behind which none is left.
    assert warp.flying == (pytest.approx((7.5, 10), abs=NEAR),)
    assert trace.flying(traced.ctas[1]) == [pytest.approx((7.5, 10), abs=NEAR)]


def test_events_without_room_are_counted_and_what_was_open_ends_with_the_last_one() -> None:
    small = HEADER + 4
    found = decode(call(small), EVENTS, small)
    assert found.lost == 2 * 4 * (len(CONSUMER) - 4) and found.capacity == small
    (cta, *_) = found.ctas
    assert [warp.lost for warp in cta.warps] == [0] * 4 + [8] * 4
    ends = {step.event.name: step.end for step in cta.warps[4].steps}
    assert ends == pytest.approx({"consume": 4, "step": 4, "wait full": 4}, abs=NEAR)
    assert any("64 events found no room, which is 4 events a warp" in text for text in found.sentences())


def test_only_some_ctas_are_read_in_full() -> None:
    found = decode(call(), EVENTS, CAPACITY, read=1)
    assert [len(cta.warps) for cta in found.ctas] == [8, 0, 1]
    assert [cta.number for cta in found.read("flash")] == [0]


def test_a_buffer_gives_back_what_kernels_stored_in_their_parts() -> None:
    torch = pytest.importorskip("torch")
    size = 1 << 20
    buffer = trace.Buffer(torch.zeros(size // 4, dtype=torch.int32))
    recorder = buffer.recorder
    assert recorder.base == buffer.words.data_ptr() and recorder.size == size
    recorder.capacity = CAPACITY
    flash, combine, _ = call()
    for one in (flash, combine):
        ctas, warps, *_ = one.words.shape
        region = recorder.region(one.kernel, (ctas, 1, 1), (warps * 32, 1, 1))
        assert region is not None
        flat = torch.from_numpy(one.words.view(np.int32).reshape(-1).copy())
        buffer.words[region.offset // 4 : region.offset // 4 + len(flat)] = flat
    recorder.region("never", (4, 1, 1), (64, 1, 1))
    slots = list(buffer.slots())
    # As many places as were used, and of a kernel that did not run its headers.
    assert [one.words.shape for one in slots] == [
        (3, 8, HEADER + len(CONSUMER), 2),
        (1, 1, HEADER, 2),
        (4, 2, HEADER, 2),
    ]
    assert decode(slots, EVENTS, CAPACITY) == decode(call(), EVENTS, CAPACITY)
    buffer.clear()
    with pytest.raises(UserError, match="stored no time stamp"):
        decode(list(buffer.slots()), EVENTS, CAPACITY)


def test_kernels_of_one_name_are_told_apart() -> None:
    flash, combine, never = call()
    found = decode([flash, combine, replace(never, kernel="flash"), replace(flash, kernel="combine")], EVENTS, CAPACITY)
    assert sorted(found.kernels) == ["combine", "combine 2", "flash"]
    assert [len(found.of(name)) for name in ("combine", "combine 2", "flash")] == [1, 2, 2]


def test_a_call_that_stored_nothing_is_refused() -> None:
    with pytest.raises(UserError, match="stored no time stamp"):
        decode([call()[2]], EVENTS, CAPACITY)


def test_spans_are_united() -> None:
    assert trace.union([(5, 6), (1, 3), (2, 4), (4, 4.5)]) == [(1, 4.5), (5, 6)]


# ---------------------------------------------------------------- what fills the time
def test_shares_of_a_warpgroup_are_all_of_its_time(traced: Trace) -> None:
    found = trace.shares(traced)
    for group in (0, 1):
        assert sum(one.percent for one in found if one.warpgroup == group) == pytest.approx(100)
    waiting = {one.name: one for one in found if one.kind == WAIT}
    assert waiting["wait empty"].percent == pytest.approx(60, abs=1) and waiting["wait empty"].role == "load"
    # Two waits with one name in a warp.
    assert (waiting["wait products"].count, waiting["wait products"].percent) == (2, pytest.approx(20, abs=1))
    assert waiting["wait full"].mean_us == pytest.approx(2, abs=NEAR)


def test_what_a_trace_says(traced: Trace) -> None:
    text = "\n".join(traced.sentences())
    for part in (
        "flash: 2 CTAs from 0.0 to 13.0 us; the last one began at 3.0 us, and the first one ended at 10.0 us.",
        "combine: 1 CTAs from 15.0 to 16.0 us",
        "A CTA of flash takes 10.0 us in the mean: 4.5 until its first products are issued, 2.5 until it has waited",
        "and 3.0 behind.",
        "in flight, or done and not yet waited for, in 25 % of its time",
        "Warpgroup 0 (load) waits in 60 % of its time. Most: wait empty 60 %",
        "Warpgroup 1 (consume) waits in 40 % of its time.",
        "the traced copy takes 15.0 us and the kernel 12.5 us, 1.20 times as long",
    ):
        assert part in text, part
    record = json.loads(json.dumps(traced.to_record()))
    assert record["kernels"][0]["last_begin_us"] == pytest.approx(3, abs=NEAR)
    assert record["traced_us"] / record["plain_us"] == pytest.approx(1.2) and record["lost"] == 0


# ---------------------------------------------------------------- for Perfetto
def test_chrome_gets_a_process_a_cta_and_a_thread_a_warp(traced: Trace) -> None:
    found = json.loads(json.dumps(trace.chrome(traced)))
    events = found["traceEvents"]
    for event in events:
        assert event["ph"] in ("M", "X") and isinstance(event["pid"], int) and isinstance(event["tid"], int)
        if event["ph"] == "X":
            assert event["dur"] >= 0 and event["ts"] >= 0 and event["name"] and event["cat"]
        else:
            assert event["name"] in ("process_name", "thread_name") and event["args"]["name"]
    names = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert list(names.values()) == [
        "flash: all CTAs, by SM", "combine: all CTAs, by SM", "flash: CTA 0 on SM 0", "flash: CTA 1 on SM 1",
        "combine: CTA 0 on SM 0",
    ]  # fmt: skip
    (pid,) = (pid for pid, name in names.items() if name == "flash: CTA 1 on SM 1")
    threads = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name" and e["pid"] == pid}
    assert threads[0] == "warp 0: load" and threads[7] == "warp 7: consume"
    assert threads[1001] == "warpgroup 1: products in flight"
    # Nested spans of a thread lie in each other, as viewers want them.
    spans = [(e["ts"], e["ts"] + e["dur"]) for e in events if e["ph"] == "X" and (e["pid"], e["tid"]) == (pid, 4)]
    assert len(spans) == 5
    for i, (begin, end) in enumerate(spans):
        for other in spans[i + 1 :]:
            assert other[1] <= end + 1e-3 or other[0] >= end - 1e-3, (begin, end, other)


# ---------------------------------------------------------------- the picture
def test_the_picture_has_a_lane_for_each_warp_that_differs(traced: Trace) -> None:
    text = picture.draw(traced)
    root = ElementTree.fromstring(text)
    words = [element.text or "" for element in root.iter("{http://www.w3.org/2000/svg}text")]
    # Of two CTAs four producers, and one consumer of four that do the same.
    assert words.count("warp 0: load") == words.count("warp 3: load") == 2
    assert words.count("warp 4: consume") == 2 and "warp 5: consume" not in words
    assert "flash (2)" in words and "combine (1)" in words and "wait empty" in words
    said = [element.text or "" for element in root.iter("{http://www.w3.org/2000/svg}title")]
    assert any(re.match(r"wait full: (1\.99|2\.0\d) us from", one) for one in said)
    assert any(one.startswith("products in flight: 2.5") for one in said)
    for rect in root.iter("{http://www.w3.org/2000/svg}rect"):
        x, width = float(rect.get("x", "")), float(rect.get("width", ""))
        assert x >= 0 and width > 0 and x + width <= picture.LEFT + picture.WIDTH + 0.01


def test_single_steps_of_a_long_cta_are_shown_at_its_begin_middle_and_end() -> None:
    warp = Warp(0, 0.0, 100.0, (), ())
    long = Trace((Cta("copy", 0, 0, 0.0, 100.0, (warp,)),), 1980.0)
    assert picture.windows(long.ctas[0]) == [("its begin", 0.0), ("its middle", 47.0), ("its end", 94.0)]
    text = picture.draw(long)
    assert "CTA 0: 6 us at its middle" in text and text.count("warp 0: kernel") == 4
    assert picture.windows(replace(long.ctas[0], end=17.0)) == []


def test_what_is_innermost_leaves_no_gap(traced: Trace) -> None:
    warp = traced.ctas[0].warps[4]
    found = picture.innermost(warp)
    names = ["elsewhere", "consume", "wait full", "step", "wait products", "wait products", "step", "consume"]
    assert [what for *_, what in found] == [*names, "elsewhere"]
    assert found[0][0] == warp.begin and found[-1][1] == warp.end
    assert all(one[1] == other[0] for one, other in itertools.pairwise(found))


def test_a_column_shows_what_fills_most_of_it() -> None:
    segments = [(0.0, 6.0, "a"), (6.0, 6.1, "b"), (6.1, 10.0, "a"), (10.0, 20.0, "c")]
    found = picture.columns(segments, 0.0, 20.0, 10.0)
    assert found == [(0.0, 5.0, "a"), (5.0, 10.0, "c")]
    assert picture.columns(segments, 5.0, 7.0, 100.0)[1] == (50.0, 55.0, "b")


# ---------------------------------------------------------------- the profile
def test_a_profile_has_the_picture_the_chrome_trace_and_the_cost(
    traced: Trace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mla_var3.lab.profiling.modes import event
    from mla_var3.lab.profiling.modes.event import Timing

    monkeypatch.setattr(event, "time_call", lambda kernel: Timing(12.5, 12.0, 13.0, 20, 4.0, 1980.0))
    monkeypatch.setattr(trace, "record", lambda plan, kernel, inputs: traced)
    monkeypatch.setattr("torch.cuda.empty_cache", lambda: None)
    problem = MlaProblem(b=1)
    plan: Any = SimpleNamespace(plan=lambda *inputs: "kernel", prepare_inputs=lambda *_, **__: ())
    facts = Facts("cute-dsl/flash_mla_v23", {}, roofline(10**9, 10**7, "bf16", H200))
    request = Request(V23, problem, "trace", out=str(tmp_path))
    run._in_process(request, plan, tmp_path, facts)
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert {"wait full", "products in flight"} <= {event["name"] for event in events}
    assert (tmp_path / "trace.svg").read_text().startswith("<svg ")
    assert facts.to_record()["trace"]["plain_us"] == 12.5
    text = render(request, H200, [facts], tmp_path, ran=True, at="now")
    assert "## Inside the kernel" in text and "1.20 times as long" in text and "`trace.svg`: picture" in text
    assert re.search(r"\| 0 \(load\) +\| wait empty +\| +60\.\d \| +1 \| +6\.\d\d \|", text)


def test_kernels_of_other_languages_are_refused_in_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if registry.missing("torch"):
        pytest.skip("torch is not installed")
    monkeypatch.setattr(Device, "detect", staticmethod(lambda: H200))
    words = ["profile", "torch/flash_mla", "--mode", "trace", "--b", "1", "--out", str(tmp_path)]
    assert cli.main(words) == 2
    said = capsys.readouterr().err
    assert "profile mode trace looks into kernels of cute-dsl, and torch/flash_mla is none" in said
    assert len(said.strip().splitlines()) == 1
    with pytest.raises(UserError, match="torch/flash_mla is none"):
        run.profile(Request(V23, MlaProblem(b=1), "trace", baseline=KernelId("torch", "mla", "flash_mla")), H200)
    monkeypatch.setattr(Device, "detect", staticmethod(lambda: None))
    assert cli.main(["profile", "cute-dsl/flash_mla_v23", "--mode", "trace", "--b", "1"]) == 2
    assert "profile mode trace needs a GPU and there is none here" in capsys.readouterr().err


def test_a_trace_without_products_or_functions_can_be_drawn() -> None:
    warp = Warp(0, 0.0, 2.0, (), ())
    bare = Trace((Cta("copy", 0, 0, 0.0, 2.0, (warp,)),), 1980.0)
    assert warp.role == "kernel" and bare.cost() is None
    assert [one.name for one in trace.shares(bare)] == ["elsewhere"]
    assert "warp 0: kernel" in picture.draw(bare)


# ---------------------------------------------------------------- a version, as it is
def test_a_version_unchanged_names_what_its_warps_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes all code of version 23, up to where the compiler would take over, which takes seconds: names come from its
    source, its barriers and what it shares."""
    if registry.missing("cute-dsl"):
        pytest.skip("nvidia-cutlass-dsl is not installed")
    from cutlass.base_dsl.dsl import BaseDSL

    from mla_var3.toolchain.cute_trace import tracing

    class Made(Exception):
        pass

    def stop(*_: Any, **__: Any) -> None:
        raise Made

    monkeypatch.setattr(BaseDSL, "_compile_or_jit_module", stop)
    plan = registry.get_plan(V23)(MlaProblem(b=1, h=64), None, H200)
    kernel = plan.plan_empty()
    recorder = trace.recorder_at(0x7F00_0000_0000)
    with tracing(recorder), pytest.raises(Made):
        kernel.compile_fn(plan.tiling, H200)
    names = {(event.kind, event.name) for event in recorder.events}
    for kind, name in (
        ("range", "load"), ("range", "consume"), ("range", "even_step"), ("range", "odd_step"),
        ("range", "exponentials"), ("range", "epilogue"), ("range", "merge_few"), ("range", "copy_query_rows"),
        ("wait", "wait full"), ("wait", "wait empty"), ("wait", "wait P_EVEN"), ("wait", "wait SCORES_ODD"),
        ("wait", "wait CONSUMERS"), ("wait", "wait flag"), ("wait", "wait launch before"), ("wait", "wait products"),
        ("issue", "products issued"),
    ):  # fmt: skip
        assert (kind, name) in names, name
    assert not {"wait barrier", "wait mbarrier"} & {name for _, name in names}
    assert [region.kernel for region in recorder.regions][:3] == ["make_schedule", "flash_mla_v23", "combine"]
    assert not recorder.left_out


@pytest.mark.gpu
@pytest.mark.parametrize(("b", "h", "t"), [(1, 128, 65536), (128, 64, 4096)])
def test_a_trace_on_a_gpu_is_that_of_the_kernel(b: int, h: int, t: int, tmp_path: Path) -> None:
    outcome = run.profile(Request(V23, MlaProblem(b=b, h=h, t=t), "trace", out=str(tmp_path)), Device.detect())
    (facts,) = outcome.facts
    found = facts.trace
    assert found is not None and found.main == "flash_mla_v23" and not found.lost
    assert not any("differ" in note or "no room" in note for note in found.notes)
    # The kernel's CTAs fill the chip, and their time is that of the call.
    assert 100 <= len(found.of(found.main)) <= 264
    last = max(cta.end for cta in found.ctas)
    assert found.traced_us is not None and 0.5 * found.traced_us < last < 1.1 * found.traced_us
    assert 800 < found.cycles < 2200
    cost = found.cost()
    assert cost is not None and 0.95 < cost < 2.0
    roles = {one.warpgroup: one.role for one in trace.shares(found)}
    assert roles == {0: "consume", 1: "consume", 2: "load"}
    for group in roles:
        assert sum(one.percent for one in trace.shares(found) if one.warpgroup == group) == pytest.approx(100, abs=1)
    text = outcome.report
    assert "## Inside the kernel" in text and "exponentials" in text
    assert (outcome.folder / "trace.json").stat().st_size > 10_000
