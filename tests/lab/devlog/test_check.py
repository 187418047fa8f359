"""`devlog check` on an entry with one mistake at a time."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from mla_var3.catalogue import ledger, registry
from mla_var3.catalogue.registry import KernelId
from mla_var3.cli.devlog import main
from mla_var3.errors import UserError
from mla_var3.lab.devlog.check import check, find_root
from mla_var3.toolchain.digest import Code, KernelCode

FAST, SLOW, COMPILED = "aaaa11112222", "bbbb33334444", "cccc55556666"


def test_good_entry_passes(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert check(project) == ([], [])
    assert main(["check", "--root", str(project)]) == 0
    assert "nothing to mend" in capsys.readouterr().out


# (what stands in the good entry, what stands there instead, the line and message that check gives)
MISTAKES = [
    ("220.2 us", "219.0 us", "21: 219.0 us differs from its record: burst of aaaa11112222 is 220.20 us"),
    ("168 registers", "168 registers and 12 GB/s", "21: 12 GB/s has no record: name it in the .records file"),
    ("220.2 us", f"220.2 us <!-- r:{FAST} burst -->", "21: a citation stands in triton-v1.records, not in a comment"),
    ("devices: [h200]\n", "devices: [h200]\nrecords: [x]\n", "8: records stand in triton-v1.records, beside the entry"),
    ("devices: [h200]\n", "devices: [h200]\ncode: 2ea73c2\n", "8: code is for a version whose file is gone, and src/"),
    ("The softmax: the tensor cores wait for it.", "", "23: section 'Bottleneck' is empty"),
    ("The softmax: the tensor cores wait for it.", "<!-- later -->", "23: section 'Bottleneck' is empty"),
    ("The softmax: the tensor cores wait for it.", "-", "23: section 'Bottleneck' is empty"),
    ("The softmax: the", "TODO: the", "24: a TODO is left: TODO: the tensor cores wait for it."),
    ("## Insights\nFewer loads matter more than more stages.\n", "", "27: section 'Insights' is missing"),
    ("## Bottleneck", "## Botleneck", "23: section 'Botleneck' is not one of: Location,"),
    ("## Insights", "## Verdict", "29: section 'Verdict' stands twice"),
    ("## What changed", "## Insights", "section 'Insights' is out of order"),
    ("from 250 us to 225 us", "a lot", "17: the hypothesis predicts no figure with a unit"),
    ("src/flash_mla_v1.py", "src/other.py", "11: Location does not name the version's file, src/flash_mla_v1.py"),
    ("verdict: kept", "verdict: keep", "6: verdict 'keep' is unknown: did you mean 'kept'?"),
    ("verdict: kept", "verdict: rejected", "26: the section must begin with the front matter's verdict, 'rejected'"),
    ("verdict: kept\n", "", "1: front matter lacks verdict"),
    ("devices: [h200]", "devices: [h100]", "7: devices lacks h200, the one of record aaaa11112222"),
    ("devices: [h200]", "devices: h200", "7: devices must be a list"),
    ("devices: [h200]", "device: [h200]", "7: front matter has no field 'device': did you mean 'devices'?"),
    ("version: 1", "version: 2", "4: version is 2, and the file is that of 1"),
    ("language: triton", "language: cutile", "3: language is cutile, and the file is that of triton"),
    ("date: 2026-11-22", "date: yesterday", "5: date 'yesterday' is not of the form"),
    ("devices: [", "devices: {", "its front matter is not YAML"),
    ("---\ndesign", "design", "1: it has no front matter"),
]


@pytest.mark.parametrize(("before", "after", "message"), MISTAKES, ids=[m[2][:60] for m in MISTAKES])
def test_each_mistake_is_one_line(project: Path, entry: Path, before: str, after: str, message: str) -> None:
    text = entry.read_text()
    assert before in text
    entry.write_text(text.replace(before, after, 1))
    failures, _ = check(project)
    mine = [line for line in failures if message in line]
    assert len(mine) == 1, failures
    assert mine[0].startswith("devlogs/flash_mla/triton-v1.md:")
    assert "\n" not in mine[0]


def test_version_without_entry(project: Path, entry: Path, capsys: pytest.CaptureFixture[str]) -> None:
    entry.unlink()
    entry.with_suffix(".records").unlink()
    assert main(["check", "--root", str(project)]) == 1
    out = capsys.readouterr()
    assert "triton-v1.md:1: triton/flash_mla_v1 has no entry: mla-var3 devlog new triton/flash_mla_v1\n" in out.out
    assert out.err == "devlog check: 1 to mend\n"


def test_wrapped_library_needs_no_entry(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mine = registry.all_kernels()
    monkeypatch.setattr(registry, "all_kernels", lambda: (*mine, KernelId("peer", "mla", "flashmla")))
    assert check(project) == ([], [])


QUOTE = "> It takes\n"
CITED = f"{FAST} burst resources.registers\n"


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        (f"{SLOW}\n", f"{SLOW}\ndddd77778888\n", "records:3: record dddd77778888 does not exist in results/"),
        (f"{SLOW}\n", f"{SLOW}\n{SLOW}\n", f"records:3: {SLOW} stands twice"),
        (f"{SLOW}\n", f"{SLOW} {FAST}\n", f"records:2: record {SLOW} {FAST} does not exist in results/"),
        (f"{SLOW}\n", f"{SLOW}\n{FAST[:6]}\n", f"records:3: {FAST[:6]} is out of order: sort the lines"),
        (CITED, CITED.replace(FAST, SLOW), "records:1: no record of this version is listed here, and no trace is"),
        (CITED, CITED.replace(FAST, SLOW), "md:21: 220.2 us differs from its record: burst of bbbb33334444 is 250 us"),
        (CITED, CITED.replace("burst", "sustained"), "md:21: 220.2 us differs from its record: sustained of aaaa1111"),
        (CITED, CITED.replace(FAST, "dddd7777"), "records:6: record dddd7777 does not exist in results/"),
        (
            CITED,
            CITED.replace("burst", "brust"),
            "records:6: aaaa11112222 brust resources.registers: the record has no",
        ),
        (CITED, CITED + CITED, "records:7: its block has no figure for burst of aaaa11112222, 220.2 us"),
        (CITED, "", "md:21: 220.2 us has no record: name it in the .records file beside the page"),
        (CITED, "", "records:5: no record stands below > It takes: add a line, ID expression ..."),
        (CITED, CITED.replace("burst", "burst/"), "records:6: aaaa11112222 burst/ resources.registers: the record has"),
        ("[Measured]", "[Messured]", "records:4: the page has no heading 'Messured'"),
        (QUOTE, "> It took\n", "records:5: no block under 'Measured' begins with 'It took'"),
        (QUOTE, ">\n", "records:5: > quotes nothing: give the beginning of the block"),
        (QUOTE, "", f"records:5: {FAST} stands behind a heading and no block: quote the block's beginning behind >"),
        (
            CITED,
            f"{CITED}\n[Verdict]\n> Kept\n{FAST}\n[Measured]\n",
            "records:11: the page has no heading 'Measured' behind the one before",
        ),
        (
            CITED,
            f"{CITED}{QUOTE}{FAST}\n",
            "records:7: no block under 'Measured' begins with 'It takes' behind the block",
        ),
    ],
)
def test_mistakes_in_the_list_of_records(project: Path, entry: Path, before: str, after: str, message: str) -> None:
    listed = entry.with_suffix(".records")
    text = listed.read_text()
    assert before in text
    listed.write_text(text.replace(before, after, 1))
    failures, _ = check(project)
    mine = [line for line in failures if line.startswith(f"devlogs/flash_mla/triton-v1.{message}")]
    assert len(mine) == 1, failures
    assert check(project, [listed])[0] == failures, "the list stands for its entry"


def test_list_without_an_entry(project: Path, entry: Path) -> None:
    entry.with_suffix(".records").rename(entry.with_name("triton-v9.records"))
    failures, _ = check(project)
    assert "devlogs/flash_mla/triton-v9.records:1: no page triton-v9.md stands beside this list" in failures
    assert any("triton-v1.records:1: no record of this version" in line for line in failures)


def test_an_entry_may_be_as_long_as_it_needs(project: Path, entry: Path) -> None:
    entry.write_text(entry.read_text() + "Fewer loads matter more than more stages. " * 400)
    assert check(project) == ([], [])


# ---------------------------------------------------------------- figures of a trace
TRACE = "results/h200/traces/2026-11-22-loads.txt"


@pytest.mark.parametrize(
    ("text", "cited", "message"),
    [
        ("It waits 18.2 % of the time.", f"{TRACE}:2 18.2", None),
        ("It waits 18 % of the time.", f"{TRACE}:1-2 18.2", None),
        ("It takes 0.905 of the time before.", f"{TRACE}:2 190.0/210.0", None),
        (
            "It waits 19.2 % of the time.",
            f"{TRACE}:2 18.2",
            "md:22: 19.2 % differs from its record: 18.2 of results/h200",
        ),
        ("It waits 18.2 % of the time.", f"{TRACE}:1 18.2", f"records:8: {TRACE}:1 has no number 18.2"),
        ("It waits 18.2 % of the time.", f"{TRACE} 18.2", f"records:8: {TRACE} names no line: write FILE:LINE"),
        ("It waits 18.2 % of the time.", "results/no.txt:1 18.2", "records:8: file results/no.txt does not exist"),
        ("It waits 18.2 % of the time.", f"{TRACE}:2 1/2/3", f"records:8: {TRACE}:2 has no number 1"),
        ("It waits 18.2 % of the time.", f"{TRACE}:2 190.0/210.0/18.2", "records:8: 190.0/210.0/18.2 is no quotient"),
    ],
)
def test_figures_of_a_trace_stand_in_the_line_that_is_named(
    project: Path, entry: Path, text: str, cited: str, message: str | None
) -> None:
    trace = project / TRACE
    trace.parent.mkdir(parents=True)
    trace.write_text("before: 210.0 us\nafter: 190.0 us, was 210.0 us; waits 18.2% of the samples\n")
    entry.write_text(entry.read_text().replace("with 168 registers.", f"with 168 registers.\n- {text}", 1))
    listed = entry.with_suffix(".records")
    listed.write_text(listed.read_text() + f"> It\n{cited}\n")
    failures, _ = check(project)
    assert len(failures) == (message is not None), failures
    assert all(line.startswith(f"devlogs/flash_mla/triton-v1.{message}") for line in failures), failures


@pytest.mark.parametrize(
    ("text", "wrong"), [("Without a GPU: 168 registers.", 0), ("Without a GPU: 169 registers.", 1)]
)
def test_figures_of_a_compiled_record(project: Path, entry: Path, text: str, wrong: int) -> None:
    entry.write_text(entry.read_text().replace("with 168 registers.", f"with 168 registers.\n- {text}", 1))
    listed = entry.with_suffix(".records")
    listed.write_text(listed.read_text() + f"> Without\n{COMPILED} resources.registers\n")
    failures, _ = check(project)
    assert len(failures) == wrong and all("169 registers differs from its record" in line for line in failures)


# ---------------------------------------------------------------- a version of several experiments
def experiment(title: str, measured: str) -> str:
    """The section of an experiment."""
    said = {
        "What changed": "The loop is unrolled.",
        "Hypothesis": "It takes 5 us less.",
        "Measured": measured,
        "Verdict": "Rejected: it spills.",
        "Insights": "Registers are full.",
    }
    return f"## Experiment: {title}\n" + "".join(f"### {name}\n{text}\n" for name, text in said.items())


@pytest.fixture
def several(project: Path, entry: Path) -> Path:
    """The entry with two experiments in place of its hypothesis."""
    text = entry.read_text()
    start, end = text.index("## Hypothesis"), text.index("## Measured")
    both = experiment("unrolled", "220.2 us.") + experiment("unrolled twice", "250.0 us.")
    text = text[:start] + text[end:]
    entry.write_text(text.replace("## Bottleneck", f"{both}\n## Bottleneck"))
    entry.with_suffix(".records").write_text(
        f"[Measured]\n> It takes\n{FAST} burst resources.registers\n\n[Experiment: unrolled]\n> 2\n{FAST} burst\n"
        f"[Experiment: unrolled twice]\n> 2\n{SLOW} burst\n"
    )
    return entry


def test_each_experiment_stands_alone(project: Path, several: Path) -> None:
    assert check(project) == ([], [])


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        ("### Hypothesis\nIt takes 5 us less.\n", "", "'Experiment: unrolled': heading 'Hypothesis' is missing"),
        ("It takes 5 us less.", "It is faster.", "the hypothesis predicts no figure with a unit: say what the version"),
        ("It takes 5 us less.", "No figure was predicted; all tilings were tried.", None),
        ("### Insights", "### Insight", "'Experiment: unrolled': heading 'Insight' is not one of: What changed, Hypo"),
        ("### Insights", "### Verdict", "'Experiment: unrolled': heading 'Verdict' stands twice"),
        ("Rejected: it", "It", "an experiment's verdict begins with one of: kept, rejected"),
        ("Registers are full.", "", "section 'Insights' is empty"),
        ("\n220.2 us.", "\n220.2 us, 3 us.", "3 us has no record: name it in the .records file beside the page"),
        ("\n250.0 us.", "\n251.0 us.", "251.0 us differs from its record: burst of bbbb33334444 is 250 us"),
        ("## Experiment: unrolled twice", "## Experiment: unrolled", "section 'Experiment: unrolled' stands twice"),
    ],
)
def test_mistakes_of_an_experiment(project: Path, several: Path, before: str, after: str, message: str | None) -> None:
    text = several.read_text()
    assert before in text
    several.write_text(text.replace(before, after, 1))
    failures, _ = check(project)
    assert len([line for line in failures if message and message in line]) == (message is not None), failures
    assert message or not failures, failures


# ---------------------------------------------------------------- versions whose file is gone
RETIRED = "src/mla_var3/kernel/flash_mla_v1.py"


def git(root: Path, *words: str) -> str:
    """Runs git in a folder, without the user's settings, and returns what it prints."""
    quiet = {"GIT_CONFIG_GLOBAL": "/dev/null", "GIT_CONFIG_NOSYSTEM": "1", "PATH": os.environ["PATH"]}
    name = ["-c", "user.name=a", "-c", "user.email=a@example.org"]
    done = subprocess.run(["git", *name, *words], cwd=root, env=quiet, capture_output=True, text=True, check=True)
    return done.stdout.strip()


@pytest.fixture
def gone(project: Path, entry: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The first commit of the project, which has the version's file; after it the file is gone."""
    monkeypatch.setattr(registry, "all_kernels", tuple)
    (project / RETIRED).parent.mkdir(parents=True)
    (project / "src" / "flash_mla_v1.py").rename(project / RETIRED)
    entry.write_text(entry.read_text().replace("src/flash_mla_v1.py", RETIRED))
    git(project, "init", "-q")
    git(project, "add", RETIRED)
    git(project, "commit", "-q", "-m", "a")
    git(project, "rm", "-q", RETIRED)
    git(project, "commit", "-q", "-m", "b")
    return git(project, "rev-parse", "--short=12", "HEAD~1")


def say_code(entry: Path, code: str) -> None:
    entry.write_text(entry.read_text().replace("devices: [h200]\n", f"devices: [h200]\ncode: {code}\n", 1))


def test_entry_of_a_version_that_is_gone_names_a_commit(project: Path, entry: Path, gone: str) -> None:
    line = "devlogs/flash_mla/triton-v1.md"
    none = "1: no version triton/flash_mla v1 exists: add code: COMMIT, the last commit that holds its file"
    assert check(project) == ([f"{line}:{none}"], [])
    say_code(entry, gone)
    assert check(project) == ([], [])


def test_commit_that_does_not_hold_the_file(project: Path, entry: Path, gone: str) -> None:
    after = git(project, "rev-parse", "--short=12", "HEAD")
    say_code(entry, after)
    message = f"devlogs/flash_mla/triton-v1.md:8: commit {after} does not hold {RETIRED}, the file that Location names"
    assert check(project) == ([message], [])


def test_commit_that_is_not_here_is_a_note(project: Path, entry: Path, gone: str) -> None:
    say_code(entry, "0123456789ab")
    note = "not here, so not asked whether they hold the files of 1 entries: commits 0123456789ab"
    assert check(project) == ([], [note])


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        ("code: ", "code: the last one, ", "8: code 'the last one, "),
        (RETIRED, "kernel/other.py", "12: Location does not name the version's file"),
        (f"`{RETIRED}`", f"`{RETIRED}` <!-- or -->", None),
        (f"`{RETIRED}`", f"gone <!-- `{RETIRED}` -->", "12: Location does not name the version's file"),
    ],
)
def test_mistakes_of_a_version_that_is_gone(
    project: Path, entry: Path, gone: str, before: str, after: str, message: str | None
) -> None:
    say_code(entry, gone)
    entry.write_text(entry.read_text().replace(before, after, 1))
    failures, _ = check(project)
    assert len(failures) == (message is not None), failures
    assert all(f"triton-v1.md:{message}" in line for line in failures), failures


def test_file_that_is_here_without_a_version(project: Path, entry: Path, gone: str) -> None:
    say_code(entry, gone)
    (project / RETIRED).parent.mkdir(parents=True, exist_ok=True)
    (project / RETIRED).write_text("# kernel\n")
    assert "which is here, and no version triton/flash_mla v1 is" in check(project)[0][0]


def test_version_that_was_not_run_needs_no_record(project: Path, entry: Path) -> None:
    text = entry.read_text().replace("verdict: kept", "verdict: not run here").replace("**Kept**", "Not run here")
    text = text.replace("devices: [h200]", "devices: []")
    entry.with_suffix(".records").unlink()
    start, end = text.index("It takes"), text.index("\n\n## Bottleneck")
    entry.write_text(text[:start] + "Nothing: it needs another architecture." + text[end:])
    said = f"devlogs/flash_mla/triton-v1.md:6: the verdict is 'not run here', and record {FAST} has timed it"
    assert check(project)[0] == [said]
    file = project / "results" / "h200" / "2026-11-22-decode.jsonl"
    file.write_text("".join(line for line in file.read_text().splitlines(keepends=True) if FAST not in line))
    assert check(project) == ([], [])


def test_a_verdict_may_rest_on_a_trace(project: Path, entry: Path) -> None:
    trace = project / "results" / "h200" / "traces" / "a.txt"
    trace.parent.mkdir()
    trace.write_text("it took 220.2 us, 168 registers\n")
    entry.with_suffix(".records").write_text("[Measured]\n> It takes\nresults/h200/traces/a.txt:1 220.2 168\n")
    assert check(project) == ([], [])


def test_corrupt_record_line_is_named_and_the_others_count(project: Path) -> None:
    file = project / "results" / "h200" / "2026-11-22-decode.jsonl"
    file.write_text(file.read_text() + '{"id": "torn\n')
    failures, _ = check(project)
    assert len(failures) == 1
    assert failures[0].startswith("results/h200/2026-11-22-decode.jsonl:4: ")


def test_a_damaged_digest_is_noticed(project: Path) -> None:
    file = project / "results" / "h200" / "2026-11-22-decode.jsonl"
    first, *others = file.read_text().splitlines()
    code = Code("sm_90a", (KernelCode("one", "a" * 16, "", 100, 1024),), ("b" * 16,)).to_record()
    damaged = {**code, "digest": "0" * 16}
    for kept, failures in ((code, 0), (damaged, 1), ({**code, "launch": []}, 1), ({"digest": code["digest"]}, 1)):
        file.write_text("\n".join([json.dumps({**json.loads(first), "code": kept}), *others]) + "\n")
        found, _ = check(project)
        said = f"results: the digest of record {json.loads(first)['id']} is not that of the code that it holds"
        assert found == [said] * failures, kept


def test_one_id_for_two_records(project: Path) -> None:
    file = project / "results" / "h200" / "2026-11-22-decode.jsonl"
    again = json.loads(file.read_text().splitlines()[0])
    (file.parent / "2026-11-23-decode.jsonl").write_text(json.dumps({**again, "host_us": 1.0}) + "\n")
    failures, _ = check(project)
    assert failures == ["results: two different records have the id bbbb33334444"]


def test_edited_kernel_is_a_note(
    project: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(ledger, "standing", lambda *arguments: ledger.OTHER)
    assert main(["check", "--root", str(project)]) == 0
    note = "note: not all of their records time the code that is here: triton/flash_mla_v1 (1 other code)"
    assert note in capsys.readouterr().out


def test_tables_of_the_readme_and_of_docs(project: Path) -> None:
    """Their figures have records, prose may have some; each is compared."""
    table = "Answers in 0.5 s.\n\n| x | us |\n|---|---|\n| a | {} |\n"
    (project / "docs" / "knowledge").mkdir(parents=True)
    for page, shown in ((project / "README.md", "220.2"), (project / "docs" / "knowledge" / "a.md", "300")):
        page.write_text(table.format(shown))
        page.with_suffix(".records").write_text(f"> a |\n{FAST} burst\n")
    assert check(project)[0] == [
        "docs/knowledge/a.md:5: 300 us differs from its record: burst of aaaa11112222 is 220.20 us"
    ]
    assert check(project, [project / "README.md"]) == ([], [])
    (project / "README.records").unlink()
    without = ["README.md:5: 220.2 us has no record: name it in the .records file beside the page"]
    assert check(project, [project / "README.md"])[0] == without


def test_a_page_has_no_citation_in_a_comment(project: Path) -> None:
    page = project / "README.md"
    page.write_text(f"It takes 220.2 us <!-- r:{FAST} burst -->.\n")
    said = "README.md:1: a citation stands in README.records, not in a comment: devlog cite writes it"
    assert check(project, [page])[0] == [said]


def test_pages_have_their_records_beside_them(project: Path) -> None:
    page = project / "docs" / "a.md"
    page.parent.mkdir()
    page.write_text("## One\n\n| x | us |\n|---|---|\n| a | 220.2 |\n| a | 250 |\n")
    listed = page.with_suffix(".records")
    listed.write_text(f"[One]\n> a |\n{FAST} burst\n> a |\n{SLOW} burst\n")
    assert check(project) == ([], [])
    listed.write_text(f"> a |\n{FAST} burst\n> a |\n{FAST} burst\n")
    failures = ["docs/a.md:6: 250 us differs from its record: burst of aaaa11112222 is 220.20 us"]
    assert check(project)[0] == check(project, [listed])[0] == failures
    page.unlink()
    assert check(project)[0] == ["docs/a.records:1: no page a.md stands beside this list"]


def test_pages_that_are_made_of_records_cite_none(project: Path) -> None:
    table = "| x | us |\n|---|---|\n| a | 300 |\n"
    for folder, count in (("docs/results", 0), ("docs", 1)):
        page = project / folder / "page.md"
        page.parent.mkdir(parents=True, exist_ok=True)
        page.write_text(table)
        assert len(check(project)[0]) == len(check(project, [page])[0]) == count


def test_a_row_names_the_kernel_of_its_record(project: Path) -> None:
    row = "| cell | kernel | us |\n|---|---|---|\n| a | {} | 220.2 |\n"
    page = project / "README.md"
    page.with_suffix(".records").write_text(f"> a |\n{FAST} burst\n")
    page.write_text(row.format("triton/flash_mla_v1"))
    assert check(project) == ([], [])
    page.write_text(row.format("triton/flash_mla_v16"))
    assert check(project)[0][:1] == [
        f"README.records:2: {FAST} burst is a record of triton/flash_mla_v1, and its row names triton/flash_mla_v16"
    ]


def test_root(project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(project / "devlogs" / "flash_mla")
    assert find_root() == project
    with pytest.raises(UserError, match="is not a folder"):
        find_root(tmp_path / "nothing")
    with pytest.raises(UserError, match="is not a file"):
        check(project, [tmp_path / "nothing.md"])


def test_name_that_is_no_entry(project: Path, entry: Path) -> None:
    entry.rename(entry.with_name("notes.md"))
    failures, _ = check(project)
    assert any("notes.md:3: language is triton, and the file is that of notes" in line for line in failures)


def test_source_of_a_version_is_its_registered_path() -> None:
    """Of the real registry: what Location must name exists."""
    for kernel in registry.all_kernels():
        assert isinstance(kernel, KernelId)
        assert kernel.path.is_file()


def test_check_takes_names_of_versions(repo_root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from mla_var3.lab.devlog.entry import path_of_label

    folder = repo_root / "devlogs" / "flash_mla"
    assert path_of_label(repo_root, "cute-dsl/flash_mla_v8") == folder / "cute-dsl-v8.md"
    assert path_of_label(repo_root, "triton/flash_mla") == folder / "triton-v0.md"
    assert path_of_label(repo_root, "docs/serving.md") is None and path_of_label(repo_root, "docs/x") is None
    assert main(["check", "cute-dsl/flash_mla_v8", "triton/flash_mla", "--root", str(repo_root)]) == 0
    with pytest.raises(UserError, match=r"triton-v77\.md is not a file"):
        main(["check", "triton/flash_mla_v77", "--root", str(repo_root)])
