"""What compute-sanitizer reports, and what of it is known: excerpts in the form of its logs, and the machine code."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import barrier_places
import pytest

from mla_var3 import paths
from mla_var3.lab.diagnosis import reports
from mla_var3.lab.diagnosis.reports import Access, Code
from mla_var3.lab.profiling import sources
from mla_var3.toolchain import sass

PACKAGE = paths.package()
CUTE = PACKAGE / "kernel" / "cute_python"


def line_of(file: Path, text: str) -> int:
    """The number of the only line that says `text`."""
    (number,) = [n for n, line in enumerate(file.read_text().splitlines(), 1) if line.strip() == text]
    return number


V0 = CUTE / "mla" / "flash_mla" / "flash_mla" / "flash_mla.py"
READ = line_of(V0, "after_odd = max_odd[wgmma.acc_row(self.thread, r)]")
WRITE = line_of(V0, "row_values[wgmma.acc_row(self.thread, r)] = value")
SYNC = line_of(CUTE / "prims" / "sync.py", "cute.arch.barrier(barrier_id=int(barrier), number_of_threads=threads)")
RACE = f"""\
========= COMPUTE-SANITIZER
========= Error: Race reported between Read access at flash_mla_0+0x7af0 in flash_mla.py:{READ}
=========     and Write access at flash_mla_0+0xf470 in flash_mla.py:{WRITE} [256 hazards]
=========
cute-dsl/flash_mla b2_s2_h64_t200_causal_list: right
========= RACECHECK SUMMARY: 1 hazard displayed (1 error, 0 warnings)
"""
BARRIER = f"""\
========= COMPUTE-SANITIZER
========= Barrier error detected. Divergent thread(s) in block.
=========     at flash_mla_0+0x10e60 in sync.py:{SYNC}
=========     by thread (192,0,0) in block (0,1,1)
=========     Saved host backtrace up to driver entry point at kernel launch time
=========         Host Frame: __tvm_ffi_flash_mla [0x23fd] in flash_mla-sm_90a-73c179d106db121c9d6c25f2.so
=========         Host Frame: call at tool+0x10 in host.py:75
=========
========= Error: process didn't terminate successfully
========= Target application returned an error
========= ERROR SUMMARY: 1 error
"""
#: The instructions around the places, as they stand in the code.
CODE = Code(
    {
        0x7AE0: "BAR.SYNC.DEFER_BLOCKING 0x2, 0x100",
        0x7AF0: "LDS R185, [R22+0x1b0]",
        0x8E10: "BAR.SYNC.DEFER_BLOCKING 0x5, 0x100",
        0xF470: "@!P1 STS [R10+0x1b0], R13",
        0xF510: "BAR.ARV 0x2, 0x100",
        0x10E60: "BAR.SYNC.DEFER_BLOCKING 0x5, 0x100",
    }
)


def count(tool: str, text: str, monkeypatch: pytest.MonkeyPatch, code: Code = CODE) -> tuple[int, int]:
    """(known, new) with that machine code at hand."""
    monkeypatch.setattr(reports, "codes", lambda function: (code,))
    known, new = reports.split(tool, text)
    return known.total(), len(new)


def without(*offsets: int, **more: str) -> Code:
    kept = {at: text for at, text in CODE.instructions.items() if at not in offsets}
    return Code(kept | {int(at.removeprefix("x"), 16): text for at, text in more.items()})


# ---------------------------------------------------------------- reading
def test_reports_are_read_with_their_places() -> None:
    (race,) = reports.read(RACE)
    assert race.accesses == (
        Access("Read", "flash_mla_0", 0x7AF0, f"flash_mla.py:{READ}"),
        Access("Write", "flash_mla_0", 0xF470, f"flash_mla.py:{WRITE}"),
    )
    (barrier,) = reports.read(BARRIER)
    assert barrier.accesses == (Access("", "flash_mla_0", 0x10E60, f"sync.py:{SYNC}"),)
    assert (reports.total(RACE), reports.total(BARRIER), reports.total("no tool")) == (1, 1, None)
    hidden = (
        "========= ERROR SUMMARY: 1024 errors\n========= ERROR SUMMARY: 824 errors were not printed. Use --print-limit"
    )
    assert reports.total(hidden) == 1024


# ---------------------------------------------------------------- known and new
def test_what_is_known_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    assert count("racecheck", RACE, monkeypatch) == (1, 0)
    assert count("synccheck", BARRIER, monkeypatch) == (1, 0)


@pytest.mark.parametrize(
    ("tool", "text", "old", "new"),
    [
        ("racecheck", RACE, "flash_mla_0", "flash_mla_v23_0"),  # another kernel
        ("racecheck", RACE, f"flash_mla.py:{READ}", f"flash_mla.py:{READ + 1}"),  # another line
        ("racecheck", RACE, f"flash_mla.py:{WRITE}", f"flash_mla.py:{WRITE - 1}"),
        ("racecheck", RACE, " in flash_mla.py:" + str(READ), ""),  # no line
        ("racecheck", RACE, "Read access", "Write access"),  # another kind
        ("racecheck", RACE, "0x7af0", "0x7af8"),  # no load there
        ("racecheck", RACE, "Error: Race", "Error: Potential race"),
        ("synccheck", RACE, "Error", "Error"),  # another tool
        ("synccheck", BARRIER, "flash_mla_0", "flash_mla_v23_0"),
        ("synccheck", BARRIER, "Divergent thread(s) in block", "Divergent thread(s) in warp"),
        ("synccheck", BARRIER, f"sync.py:{SYNC}", f"sync.py:{SYNC + 1}"),
        ("synccheck", BARRIER, "0x10e60", "0x10e70"),  # no barrier there
        ("racecheck", BARRIER, "block (0", "block (0"),
    ],
)
def test_anything_else_is_new(tool: str, text: str, old: str, new: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert old in text and count(tool, text.replace(old, new), monkeypatch) == (0, 1)


@pytest.mark.parametrize(
    ("text", "code"),
    [
        (RACE, without(0xF510, xf460="BAR.ARV 0x2, 0x100")),  # the write moved behind the arrival
        (RACE, without(0x7AE0, x7b00="BAR.SYNC.DEFER_BLOCKING 0x2, 0x100")),  # the read moved before the wait
        (RACE, without(0x7AE0, x7ae0="BAR.SYNC.DEFER_BLOCKING 0x3, 0x100")),  # waits for something else
        (RACE, without(0x7AE0)),  # nobody waits
        (BARRIER, without(0x8E10)),  # the only place that waits there: then threads are missing
        (BARRIER, without(0x10E60, x10e60="@!P0 BAR.SYNC.DEFER_BLOCKING 0x5, 0x100")),
        (BARRIER, without(0x10E60, x10e60="BAR.SYNC.DEFER_BLOCKING 0x3, 0x100")),
    ],
)
def test_without_the_barrier_in_the_machine_code_it_is_new(
    text: str, code: Code, monkeypatch: pytest.MonkeyPatch
) -> None:
    tool = "racecheck" if text is RACE else "synccheck"
    assert count(tool, text, monkeypatch, code) == (0, 1)
    monkeypatch.setattr(reports, "codes", lambda function: ())  # no object of the kernel is here
    assert not reports.split(tool, text)[0]


#: Of flash_mla_mma_v3: the code of the warps of the output, and behind it that of the warps of the scores.
MMA = CUTE / "mla" / "flash_mla_mma" / "flash_mla_mma_v3" / "flash_mla_mma_v3.py"
MMA_READ = line_of(MMA, "cute.autovec_copy(self.moved_in(buffer), moved)")
MMA_WRITE = line_of(MMA, "moved[self.me] = any_moves")
MMA_RACE = f"""\
========= Error: Race reported between Write access at flash_mla_mma_v3_1+0x1b5e0 in flash_mla_mma_v3.py:{MMA_WRITE}
=========     and Read access at flash_mla_mma_v3_1+0x79a0 in flash_mla_mma_v3.py:{MMA_READ} [4096 hazards]
"""
MMA_CODE = {
    0x7340: "BAR.ARV 0x4, 0x180",
    0x7920: "BAR.SYNC.DEFER_BLOCKING R142, 0x180",
    0x79A0: "LDS.128 R4, [UR25+0x40]",
    0x8460: "@!P1 BAR.ARV R4, 0x180",
    0x93D0: "BAR.SYNC.DEFER_BLOCKING 0x1, 0x100",
    0x18F20: "BAR.SYNC.DEFER_BLOCKING R3, 0x180",
    0x1A3C0: "BAR.ARV R3, 0x180",
    0x1AA90: "BAR.SYNC.DEFER_BLOCKING R17, 0x180",
    0x1B5E0: "@!P2 STS [R11+0x20], R4",
    0x1B850: "BAR.ARV R3, 0x180",
}


def test_warps_that_arrive_are_known_to_hand_over(monkeypatch: pytest.MonkeyPatch) -> None:
    assert count("racecheck", MMA_RACE, monkeypatch, Code(MMA_CODE)) == (1, 0)
    other = MMA_RACE.replace("flash_mla_mma_v3_1", "flash_mla_mma_v1_1")
    assert count("racecheck", other, monkeypatch, Code(MMA_CODE)) == (0, 1)


@pytest.mark.parametrize(
    ("gone", "more"),
    [
        ((0x1B850,), {0x1B5D0: "BAR.ARV R3, 0x180"}),  # the write moved behind the arrival
        ((0x1B850,), {}),  # no one arrives behind the write
        ((0x1AA90,), {}),  # the writer does not wait until the place is free
        ((0x7920,), {0x79B0: "BAR.SYNC.DEFER_BLOCKING R142, 0x180"}),  # the read moved ahead of the wait
        ((0x7920,), {0x7920: "BAR.SYNC.DEFER_BLOCKING R142, 0x100"}),  # waits for fewer threads
        ((0x8460,), {}),  # the readers do not say that they have read
        ((0x1B5E0,), {}),  # no store there
        ((0x79A0,), {0x79A0: "LDG.E.128 R4, [R2]"}),  # and no load of shared memory
    ],
)
def test_without_a_barrier_between_such_warps_it_is_new(
    gone: tuple[int, ...], more: dict[int, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    code = Code({at: text for at, text in MMA_CODE.items() if at not in gone} | more)
    assert count("racecheck", MMA_RACE, monkeypatch, code) == (0, 1)


def test_the_verb_ends_with_1_when_something_is_new_or_hidden(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(reports, "codes", lambda function: (CODE,))
    log = tmp_path / "a.log"

    def run(text: str) -> tuple[int, str]:
        log.write_text(text)
        status = reports.main(["racecheck", str(log)])
        return status, capsys.readouterr().out

    assert run(RACE)[0] == 0
    status, out = run(RACE.replace("flash_mla_0", "flash_mla_v23_0"))
    assert status == 1 and "1 new: Error: Race reported" in out and "flash_mla_v23_0+0x7af0" in out
    status, out = run(RACE.replace("SUMMARY: 1 hazard", "SUMMARY: 3 hazards"))
    assert status == 1 and "2 that were not printed" in out
    assert run("nothing of the tool\n")[0] == 2
    assert reports.main([]) == 2 and reports.main(["racecheck", str(tmp_path / "gone")]) == 2


def test_every_known_line_is_in_the_sources() -> None:
    for known in reports.KNOWN:
        for file, text in known.lines:
            line_of(PACKAGE / file, text)


# ---------------------------------------------------------------- machine code
COMPILE = """
import sys
from pathlib import Path
from mla_var3.device import Device
from mla_var3.catalogue.registry import KernelId, get_plan
from mla_var3.workload.decode import MlaProblem
h200 = Device.get("h200")
plan = get_plan(KernelId.parse(sys.argv[2]))(MlaProblem(b=2, s=2, h=64, t=200, causal=True), None, h200)
made = plan.plan_empty()
getattr(made, "stages", [made])[0].compile(Path(sys.argv[1]), h200, keep=("cubin",))
"""


def cubin_of(folder: Path, label: str) -> Path:
    """The cubin of a version, with lines."""
    env = {"PATH": "/usr/bin:/bin", "HOME": str(folder), "CUTE_DSL_LINEINFO": "1", "PYTHONPATH": ":".join(sys.path)}
    words = [sys.executable, "-c", COMPILE, str(folder), label]
    done = subprocess.run(words, capture_output=True, text=True, check=False, env=env, timeout=240)
    assert done.returncode == 0, done.stderr[-2000:]
    return folder / f"{label.partition('/')[2]}.cubin"


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The cubin of version 0, with lines."""
    return cubin_of(tmp_path_factory.mktemp("cubins"), "cute-dsl/flash_mla")


def accesses(cubin: Path, known: reports.Known) -> tuple[Code, list[int], list[int]]:
    """(code, stores, loads) of shared memory at the two lines."""
    listing = subprocess.run(
        [str(sass.tool("nvdisasm")), "-g", "-c", str(cubin)], capture_output=True, text=True, check=True
    ).stdout
    places = [(Path(file).name, line_of(PACKAGE / file, text)) for file, text in known.lines]
    found: tuple[list[int], list[int]] = ([], [])
    here = None
    for row in listing.splitlines():
        if place := re.search(r'//## File "([^"]+)", line (\d+)', row):
            here = (Path(place[1]).name, int(place[2]))
        elif here in places and (match := re.match(r"\s+/\*([0-9a-f]{4,})\*/\s+(?:@!?U?P\d+ +)?(STS|LDS)\b", row)):
            found[match[2] == "LDS"].append(int(match[1], 16))
    return Code.of(sass.disassemble(cubin)), *found


def near(code: Code, at: int, step: int) -> str:
    """The next (1) or last (-1) named barrier from an offset."""
    offsets = sorted((o for o, text in code.instructions.items() if re.match(r"BAR\.", text)), reverse=step < 0)
    return next(code.instructions[o] for o in offsets if (o - at) * step > 0)


def test_version_0_hands_its_maxima_over_in_order(compiled: Path) -> None:
    """Each store of max_odd stands before an arrival at barrier 2, each load behind a wait there; copy by copy."""
    (known,) = (k for k in reports.KNOWN if k.tool == "racecheck" and k.kernels == ("flash_mla",))
    code, stores, loads = accesses(compiled, known)
    stores = [at for at in stores if near(code, at, 1).startswith("BAR.ARV 0x2,")]
    loads = [at for at in loads if near(code, at, -1).startswith("BAR.SYNC.DEFER_BLOCKING 0x2,")]
    copies = len(code.barriers(2, "ARV"))
    assert copies == 3 and len(stores) == len(loads) == 2 * copies  # two rows a thread
    for n, (store, load) in enumerate(zip(stores, loads, strict=True)):
        assert code.ordered(store, load, 2), n
    assert not code.ordered(stores[2], loads[0], 2)  # the next copy's store is not before this one's load
    # And a store waits until the loads of the turn before are behind: barrier 1 lies between them, the other way round.
    assert all(near(code, at, -1).startswith("BAR.SYNC.DEFER_BLOCKING 0x1,") for at in stores)


@pytest.mark.slow
def test_warps_of_scores_and_of_outputs_hand_over_in_order(tmp_path: Path) -> None:
    """flash_mla_mma_v3: each store of what goes with P and each load of it, in the loop over KV tiles and behind it."""
    (known,) = (k for k in reports.KNOWN if k.threads)
    code, stores, loads = accesses(cubin_of(tmp_path, "cute-dsl/flash_mla_mma_v3"), known)
    assert (len(stores), len(loads)) == (28, 26)  # in the loop and behind it
    assert all(code.handed_over(store, load, known.threads) for store in stores for load in loads)
    assert not any(code.handed_over(load, store, known.threads) for store in stores for load in loads)


def test_version_0_has_a_place_for_each_consumer_at_the_barrier_of_its_epilogue(compiled: Path) -> None:
    """synccheck reports the last two; the first, behind the load of the query tile, is one for both consumers."""
    code = Code.of(sass.disassemble(compiled))
    places = code.barriers(5, "SYNC")
    assert len(places) == 3 and all(code.waits_at(at, (5,)) for at in places)


def test_the_smallest_kernels_have_what_they_are_about(tmp_path: Path) -> None:
    def code(variant: str, **options: str) -> Code:
        (tmp_path / "a.ptx").write_text(barrier_places.ptx(variant, options))
        words = [str(sass.tool("ptxas")), "-arch", "sm_90a", "-o", str(tmp_path / "a.cubin"), str(tmp_path / "a.ptx")]
        subprocess.run(words, check=True, capture_output=True, env={**os.environ, "TMPDIR": str(tmp_path)})
        return Code.of(sass.disassemble(tmp_path / "a.cubin"))

    def memory(of: Code, name: str) -> list[int]:
        return [at for at, text in of.instructions.items() if text.startswith(name)]

    one, two, none, give = (code(name) for name in ("one", "two", "none", "give"))
    assert [len(each.barriers(5, "SYNC")) for each in (one, two, none, give)] == [1, 2, 0, 1]
    assert [len(each.barriers(5, "ARV")) for each in (one, two, none, give)] == [0, 0, 0, 1]
    assert len(code("two", sync="barrier.sync").barriers(5, "SYNC")) == 2
    for own, between in (("1", 0), ("2", 1)):
        handed = code("pass", own=own)
        (store,), (arrival,) = memory(handed, "STS"), handed.barriers(5, "ARV")
        assert sum(store < at < arrival for at in handed.barriers(8, "SYNC")) == between
        assert len(handed.barriers(8, "SYNC")) == int(own)
    stores, loads = memory(give, "STS"), memory(give, "LDS")
    assert give.ordered(stores[0], loads[1], 5) and give.ordered(stores[1], loads[0], 6)
    assert not none.ordered(memory(none, "STS")[0], memory(none, "LDS")[1], 5)
    assert all(two.waits_at(at, (5,)) for at in two.barriers(5)) and not one.waits_at(one.barriers(5)[0], (5,))


def test_lines_of_a_report_are_read_from_the_package() -> None:
    assert sources.lines(str(CUTE / "prims" / "sync.py"))[SYNC - 1].strip().startswith("cute.arch.barrier(")
