"""Bad input, found before the work: one sentence that names what was given, and no traceback."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import os
import time
from pathlib import Path
from typing import Any

import pytest

import made_up
from mla_var3 import cli, files, record, workload
from mla_var3.catalogue import jobs, registry
from mla_var3.device import Device
from mla_var3.errors import UserError, nearest
from mla_var3.lab.sweep import config as sweep_config
from mla_var3.names import in_order

HUGE = 99_999_999_999
needs_torch = pytest.mark.skipif(bool(registry.missing("torch")), reason="no torch here")


@pytest.fixture(autouse=True)
def here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """An empty folder to run in, on a machine without a GPU."""
    monkeypatch.setattr(Device, "detect", staticmethod(lambda index=0: None))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def said(words: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """The one sentence of a command that ends with 2."""
    assert cli.main(words) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and err.startswith("mla-var3: ")
    return err


# ---------------------------------------------------------------- fields of a problem
def test_every_field_of_a_workload_is_an_option() -> None:
    from mla_var3.cli.arguments import problem_of

    parser = cli.parser_of("check")
    norm = problem_of(
        parser.parse_args(["x", "--rows", "3", "--residual", "--problem", "eps=1e-5"]), workload.get("norm")
    )
    assert (norm.rows, norm.residual, norm.eps) == (3, True, 1e-5)
    for name in workload.names():
        kind = workload.get(name).problem
        for field in kind.fields():
            value = getattr(kind(), field)
            if isinstance(value, int) and not isinstance(value, bool):
                made = parser.parse_args(["x", f"--{field}", "7"])
                assert getattr(made, field, None) in (7, "7") or f"{field}=7" in made.problem, (name, field)


@needs_torch
def test_a_field_of_another_workload_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert "problem has no field 'rows'" in said(["check", "torch/flash_mla", "--device", "cpu", "--rows", "3"], capsys)


@pytest.mark.parametrize("name", workload.names())
def test_a_field_of_an_odd_type_is_named(name: str) -> None:
    """What `--problem` and config files can hold, in fields that take something else: a sentence, or it is taken."""
    kind = workload.get(name).problem
    odd = ["nan", "", -1, 1.5, True, None, [], [1], [[1, 2]], [None], ["a"], {}, {"name": "ragged", "seed": "x"}]
    for field in set(kind.fields()) - {"missing"}:
        for value in (*odd, float("nan"), float("inf")):
            with contextlib.suppress(UserError):
                made = kind.from_record({field: value})
                assert made.label and made.cost() and hash(made) is not None
    if "softmax_scale" in kind.fields():
        for value in ("nan", float("nan"), True, [1]):
            with pytest.raises(
                UserError, match=r"problem\.softmax_scale = .* is no finite number: use for example 0\.1"
            ):
                kind.from_record({"softmax_scale": value})


@pytest.mark.parametrize("verb", ["devlog", "knowledge"])
def test_a_verbs_own_verbs_say_what_they_do(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    for name in cli.load(verb).VERBS:
        with pytest.raises(SystemExit):
            cli.main([verb, name, "--help"])
        usage, described, _ = capsys.readouterr().out.split("\n\n", 2)
        assert usage.startswith(f"usage: mla-var3 {verb} {name}") and described[0].isupper() and described[-1] == "."


# ---------------------------------------------------------------- numbers
@pytest.mark.parametrize("name", workload.names())
def test_a_number_that_no_device_can_hold_is_refused_at_once(name: str) -> None:
    kind = workload.get(name).problem
    whole = [f.name for f in dataclasses.fields(kind) if type(getattr(kind(), f.name)) is int]
    assert len(whole) >= 3
    for field in whole:
        began = time.monotonic()
        with pytest.raises(UserError, match=rf"problem\.{field} = {HUGE}|problem\.{field} .* fit"):
            kind.from_record({field: HUGE})
        assert time.monotonic() - began < 1


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["check", "torch/flash_mla", "--b", str(HUGE)], f"problem.b = {HUGE} is too large: use at most 1,048,576"),
        (["compile", "triton/flash_mla", "--t", str(HUGE)], f"problem.t = {HUGE} is too large: use at most 2,147"),
        (["check", "torch/flash_mla", "--lengths", "5,-1"], "--lengths 5,-1 has -1: give each request at least 0"),
        (["check", "torch/flash_mla", "--lengths", "5,1.5"], "--lengths '1.5' is not a whole number"),
        (["compile", "triton/flash_mla", "--jobs", "-1"], "--jobs -1 is below 0: give a number of processes"),
        (["check", "torch/flash_mla", "--b", "1.5"], "--b '1.5' is not a whole number (mla-var3 check --help)"),
        (["check", "torch/flash_mla", "--sanitize-timeout", "x"], "--sanitize-timeout 'x' is not a number"),
        (["check", "torch/flash_mla", "--lengths", "-1,5"], "one that begins with a minus is written --lengths=-1"),
        (["check", "torch/flash_mla", "--lengths=-1,5"], "--lengths -1,5 has -1: give each request at least 0"),
        (["check", "torch/flash_mla", "--seed", "9" * 30], "--seed " + "9" * 30 + " is no seed: use a whole number"),
        (["check", "torch/flash_mla", "--seed", "-1"], "--seed -1 is no seed: use a whole number from 0 to"),
        (["sweep", "seed=-1"], "seed = -1 is no seed: use a whole number from 0 to"),
        (["sweep", "tilings=hello"], "tilings is a list: write for example 'tilings=[{num_splits: 1},{}]'"),
        (["sweep", "--cfg", "nope"], "--cfg 'nope' is unknown: valid: all, hydra, job"),
        (["sweep", "--info", "nope"], "--info 'nope' is unknown: valid: all, config, defaults"),
        (["report", "--picture", "map"], "--picture says which pictures, and not where: add --pictures DIR"),
        (["check", ""], "one of the names is empty: leave it out, or say what it is"),
        (["compare", ""], "one of the names is empty"),
        (["devlog", "cite", ""], "one of the names is empty"),
        (["knowledge", "find", ""], "one of the names is empty"),
        (["--bundle"], "--bundle takes a folder, and a verb stands behind it: mla-var3 --bundle DIR check KERNEL"),
        (["compile", "triton/flash_mla", "--experiment", "decode"], "--experiment says what a bundle holds"),
        (["clone", "cute-dsl/flash_mla", "9" * 30], "is above 9999: choose another version"),
        (["knowledge", "find", "--language", "rust"], "--language 'rust' is unknown: valid: cute-dsl, cutile-dsl"),
        (["knowledge", "find", "--arch", "hopper"], "--arch 'hopper' is no architecture: write it as in --arch sm_90a"),
        (["knowledge", "find", "rows=nan"], "'rows=nan': 'nan' is not a number"),
        (["knowledge", "find", "rows=1e999"], "'rows=1e999': '1e999' is not a number"),
        (["knowledge", "compile", "nopage.md"], "nopage.md cannot be read: no such file or directory"),
        (["sweep", "experiment=captured", "workload=nodir"], "nodir cannot be read: no such file or directory"),
        (["sweep", "jobs=-1"], "jobs = -1 is below 0: give at least 0"),
        (["sweep", "budget_s=-3"], "budget_s = -3 is below 0"),
        (["sweep", "experiment.name=a/b"], "experiment.name = 'a/b' names a file: use letters, digits"),
        (["clone", "peer/fa4"], "peer/fa4 wraps somebody else's library"),
        (["knowledge", "find", "--bound", "foo"], "--bound 'foo' is unknown: valid: compute, memory"),
        (["knowledge", "find", "--bund", "memory"], "there is no option --bund: did you mean '--bound'?"),
        (["devlog", "render", "--state", "hot"], "--state 'hot' is unknown: valid: burst, sustained"),
    ],
)
@needs_torch
def test_what_makes_no_sense_is_named(words: list[str], sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert sentence in said(words, capsys)


def test_a_sweep_is_refused_before_it_is_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    from mla_var3.lab.sweep import run

    def planned(*_: Any) -> None:
        raise AssertionError("planned")

    monkeypatch.setattr(run, "expand_cells", planned)
    for word in ("jobs=-1", "experiment.name=a/b", "results_dir=/proc/x", "compile_dir=/proc/x"):
        words = ["experiment=quickstart", word]
        if word.startswith("results_dir"):
            monkeypatch.setattr(Device, "detect", staticmethod(lambda index=0: Device.get("h200")))
        with pytest.raises(UserError, match=word.split("=")[0]):
            run.main(words)


# ---------------------------------------------------------------- files that cannot be read
LATIN = b"# caf\xe9\n"


def test_a_page_that_is_not_utf8_is_named(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "latin.md").write_bytes(LATIN)
    assert "latin.md is not UTF-8 (byte 5): save it in that encoding" in said(
        ["knowledge", "compile", "latin.md"], capsys
    )
    folder = here / "docs" / "knowledge" / "optimizations"
    folder.mkdir(parents=True)
    (folder / "page.md").write_bytes(LATIN)
    (here / "results").mkdir()
    (here / "devlogs").mkdir()
    (here / "devlogs" / "page.md").write_bytes(LATIN)
    for words in (["knowledge", "check", "--root", "."], ["devlog", "check", "--root", ".", "devlogs/page.md"]):
        assert "page.md is not UTF-8 (byte 5): save it in that encoding" in said(words, capsys)


def test_captured_calls_that_are_none_are_named_by_line(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "latin.jsonl").write_bytes(LATIN)
    (here / "list.jsonl").write_text("\n[1, 2]\n")
    words = ["sweep", "experiment=captured"]
    assert "latin.jsonl is not UTF-8 (byte 5)" in said([*words, "workload=latin.jsonl"], capsys)
    sentence = said([*words, "workload=list.jsonl"], capsys)
    assert "list.jsonl, line 2, is no workload of flashinfer-bench" in sentence and "MLA_VAR3_CAPTURE" in sentence


def test_a_file_that_must_not_be_read_is_named(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also where nobody looked for that: the last words of the command are a sentence."""

    def denied(path: Path, *_: Any, **__: Any) -> bytes:
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    (here / "a.jsonl").write_text("{}\n")
    with monkeypatch.context() as patch:
        patch.setattr(Path, "read_bytes", denied)
        assert "a.jsonl cannot be read: permission denied; give another, or mend it" in said(
            ["compare", "a.jsonl"], capsys
        )
    from mla_var3.cli import list as verb

    monkeypatch.setattr(verb, "run", lambda args: denied(here / "x"))
    assert "x cannot be read or written: permission denied (--traceback shows by what)" in said(["list"], capsys)
    assert "a cannot be read or written: file name too long" in said(["compare", "a" * 300], capsys)


def test_overrides_may_stand_behind_hydras_flags(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Also where there is a conf/ of the user's own, which makes an override that stands in front of them."""
    (here / "conf" / "experiment").mkdir(parents=True)
    assert cli.main(["sweep", "--cfg", "job", "experiment=decode"]) == 0
    assert "name: decode" in capsys.readouterr().out


# ---------------------------------------------------------------- names
def test_numbers_in_names_sort_as_numbers() -> None:
    assert in_order(["v10", "v9", "b128_t64", "b16_t64", "v9"]) == ["b16_t64", "b128_t64", "v9", "v10"]


def test_of_a_long_list_the_nearest_three_are_named() -> None:
    choices = [f"b{b}_s1_h128_t{t}" for b in range(1, 60) for t in (64, 4096)]
    text = nearest("b7_s1_h128_t4095", choices)
    assert text.startswith("did you mean 'b7_s1_h128_t4096'? (also near, of 118: ")
    assert len(text) < 160 and text.count("_h128_") == 3
    far = nearest("x", choices)
    assert far.startswith("the nearest of 118 are ") and len(far) < 160
    assert nearest("memry", ["compute", "memory"]) == "did you mean 'memory'? (valid: compute, memory)"


@pytest.mark.parametrize(
    "words",
    [
        ["check", "cute-dsl/flash_mla_v9999"],
        ["compile", "nothing/like_this"],
        ["compare", "--cells", "b128_s1_h128_t4097"],
        ["compare", "--kernels", "cute/flash"],
        ["report", "--show", "cell", "--cell", "b128_s1_h128_t4097"],
    ],
)
def test_unknown_kernels_and_cells_name_the_nearest_three(
    words: list[str], capsys: pytest.CaptureFixture[str], shipped: Path
) -> None:
    err = said(words, capsys)
    assert len(err) < 320
    if words[-1].startswith("b128"):
        assert "did you mean 'b128_s1_h128_t4096'?" in err


@pytest.fixture
def shipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Records of sixty cells, in place of those that are shipped."""
    from mla_var3 import paths
    from mla_var3.workload.decode import MlaProblem

    folder = tmp_path / "shipped"
    store = record.RecordStore(folder / "h200" / "2026-01-02-decode.jsonl")
    monkeypatch.setattr(os, "fsync", lambda fd: None)
    for number in range(60):
        problem = MlaProblem(b=128 + number // 2, page=64 if number % 2 else 32)
        store.append(made_up.record("cute-dsl/flash_mla_v23", 50.0, problem, limit=25.0, experiment="decode"))
    monkeypatch.setattr(paths, "shipped_results_dir", lambda: folder)
    return folder


def test_report_takes_the_cells_that_compare_prints(shipped: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["compare", "--cells", "b130_*"]) == 0
    lines = capsys.readouterr().out.splitlines()
    cells = [line.split()[0] for line in lines if line.strip().startswith("b130_")]
    assert cells == ["b130_s1_h128_t4096", "b130_s1_h128_t4096_page32"], "problems that differ have names that differ"
    for cell in cells:
        assert cli.main(["report", "--show", "cell", "--cell", cell]) == 0
        assert f"{cell} on h200" in capsys.readouterr().out


# ---------------------------------------------------------------- folders
@pytest.mark.parametrize(
    ("words", "name"),
    [
        (["sweep", "experiment=quickstart", "compile_dir=blocked/x"], "compile_dir ="),
        (["compile", "triton/flash_mla", "--keep", "ptx", "--out", "blocked/x"], "--out"),
        (["compile", "cute-dsl/flash_mla", "--bundle", "blocked/x"], "--bundle"),
        (["profile", "torch/flash_mla", "--out", "blocked/x"], "--out"),
        (["diff", "triton/flash_mla", "torch/flash_mla", "--out", "blocked/x"], "--out"),
        (["check", "torch/flash_mla", "--keep", "ir", "--debug-out", "blocked/x"], "--debug-out"),
        (["report", "--out", "blocked/x/page.html"], "--out"),
        (["report", "--data", "blocked/x/data.csv"], "--data"),
        (["report", "--pictures", "blocked/x"], "--pictures"),
        (["devlog", "render", "--out", "blocked/x"], "--out"),
    ],
)
@needs_torch
def test_a_folder_that_cannot_be_written_is_found_first_under_its_own_name(
    words: list[str], name: str, here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def worked(*_: Any, **__: Any) -> None:
        raise AssertionError("work was done first")

    monkeypatch.setattr(record, "load", worked)
    monkeypatch.setattr(jobs, "compile_all", worked)
    (here / "blocked").write_text("a file")
    err = said(words, capsys)
    folder = "blocked/x"
    assert f"{name} {folder} cannot be written (blocked): not a directory; give another folder" in err
    assert sorted(p.name for p in here.iterdir()) == ["blocked"], "looking leaves nothing behind"


def test_bench_looks_at_its_folder_before_it_measures(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(Device, "detect", staticmethod(lambda index=0: Device.get("h200")))
    (here / "blocked").write_text("a file")
    assert "--results-dir blocked/x cannot be written" in said(
        ["bench", "triton/flash_mla", "--results-dir", "blocked/x"], capsys
    )


# ---------------------------------------------------------------- a full disk
def full(fd: int) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_a_full_disk_leaves_the_old_file(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = here / "out" / "page.html"
    files.write_whole(page, "old")
    monkeypatch.setattr(files.os, "fsync", full)
    with pytest.raises(UserError, match=r"cannot write .*page\.html: the disk is full; what was there is unchanged"):
        files.write_whole(page, "new" * 1000)
    assert page.read_text() == "old"
    assert [p.name for p in page.parent.iterdir()] == ["page.html"]
    with pytest.raises(UserError, match=r"cannot write .*other.html: the disk is full\.$"):
        files.write_whole(here / "other.html", "new")


def test_the_reports_page_survives_a_full_disk(
    here: Path, shipped: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from mla_var3.lab.report import page

    monkeypatch.setattr(page, "page", lambda *_, **__: "new")
    (here / "page.html").write_text("old")
    with monkeypatch.context() as patch:
        patch.setattr(files.os, "fsync", full)
        assert cli.main(["report", "--out", "page.html"]) == 2
        assert "cannot write page.html: the disk is full; what was there is unchanged" in capsys.readouterr().err
        assert (here / "page.html").read_text() == "old"
    assert cli.main(["report", "--out", "page.html"]) == 0
    assert (here / "page.html").read_text() == "new"
    assert (here / "page.html").stat().st_mode & 0o777 == 0o644


def test_a_link_and_a_pipe_stay_what_they_are(here: Path) -> None:
    (here / "real.txt").write_text("old")
    (here / "link.txt").symlink_to("real.txt")
    files.write_whole("link.txt", "new")
    assert (here / "link.txt").is_symlink() and (here / "real.txt").read_text() == "new"
    files.write_whole("/dev/null", "gone")
    assert not Path("/dev/null").is_file()


def test_experiment_names_of_files_are_judged_too(here: Path) -> None:
    (here / "conf" / "experiment").mkdir(parents=True)
    (here / "conf" / "experiment" / "mine.yaml").write_text("name: a/b\ncells: [{b: 1}]\n")
    with pytest.raises(UserError, match=r"experiment\.name = .a/b. names a file"):
        sweep_config.compose(["experiment=mine"])
