"""`devlog check` on an entry with one mistake at a time."""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path

import pytest

from mla_var3.cli.devlog import main
from mla_var3.errors import UserError
from mla_var3.kernel import ledger, registry
from mla_var3.kernel.registry import KernelId
from mla_var3.lab.devlog.check import MOST_WORDS, check, find_root
from mla_var3.toolchain.digest import Code, KernelCode

FAST, SLOW = "aaaa11112222", "bbbb33334444"


def test_good_entry_passes(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert check(project) == ([], [])
    assert main(["check", "--root", str(project)]) == 0
    assert "nothing to mend" in capsys.readouterr().out


# (what stands in the good entry, what stands there instead, the line and message that check gives)
MISTAKES = [
    ("220.2 us <!-- r", "219.0 us <!-- r", "21: 219.0 us differs from its record: burst is 220.20 us"),
    (f" <!-- r:{FAST} burst -->", "", "21: 220.2 us has no record beside it"),
    ("burst --> with", "sustained --> with", "21: 220.2 us differs from its record: sustained is 264.24 us"),
    (f"<!-- r:{FAST} burst -->", "<!-- r:dddd burst -->", "21: record dddd does not exist in results/"),
    (f"<!-- r:{FAST} burst -->", f"[r:{FAST} burst]", f"21: [r:{FAST} burst] is written <!-- r:{FAST} burst -->"),
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


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        (f"{FAST}\n", "dddd77778888\n", "records:3: record dddd77778888 does not exist in results/"),
        (f"{FAST}\n", "", f"records:1: record {FAST} is cited in triton-v1.md and not listed here"),
        (f"{FAST}\n", "", "records:1: no record of this version is listed here: a verdict rests on at least one"),
        (f"{FAST}\n", f"{FAST}\n{FAST}\n", f"records:3: {FAST} stands twice"),
        (f"{FAST}\n", f"{FAST} {SLOW}\n", f"records:2: record {FAST} {SLOW} does not exist in results/"),
        (f"{SLOW}\n", f"{SLOW}\n{FAST[:6]}\n", f"records:4: {FAST[:6]} is out of order: sort the lines"),
        (FAST, f"# {FAST}", f"records:1: record {FAST} is cited in triton-v1.md and not listed here"),
    ],
)
def test_mistakes_in_the_list_of_records(project: Path, entry: Path, before: str, after: str, message: str) -> None:
    listed = entry.with_suffix(".records")
    text = listed.read_text()
    if after.startswith("dddd"):
        text = text.replace(before, "").rstrip() + "\n"
        after = text.split("\n", 1)[1] + after
        before = text.split("\n", 1)[1]
    assert before in text
    listed.write_text(text.replace(before, after, 1))
    failures, _ = check(project)
    assert [line for line in failures if line == f"devlogs/flash_mla/triton-v1.{message}"], failures
    assert check(project, [listed])[0] == failures, "the list stands for its entry"


def test_list_without_an_entry(project: Path, entry: Path) -> None:
    entry.with_suffix(".records").rename(entry.with_name("triton-v9.records"))
    failures, _ = check(project)
    assert "devlogs/flash_mla/triton-v9.records:1: no entry triton-v9.md stands beside this list" in failures
    assert any("triton-v1.records:1: no record of this version" in line for line in failures)


def test_an_entry_is_read_in_two_minutes(project: Path, entry: Path) -> None:
    text = entry.read_text()
    body = re.sub(r" *<!--.*?-->", "", text.split("---", 2)[2], flags=re.DOTALL)
    left = MOST_WORDS - len(body.split())
    full = text.replace("date: 2026-11-22", "date: 2026-11-22 # of the last run") + "\n<!-- a comment\nof two lines -->"
    entry.write_text(full + " word" * left + "\n")
    assert check(project) == ([], []), "comments and front matter count as no words"
    entry.write_text(full + " word" * (left + 1) + "\n")
    message = "it has 601 words, and an entry may have 600 at most: it is read in two minutes"
    assert check(project) == ([f"devlogs/flash_mla/triton-v1.md:1: {message}"], [])


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
        (RETIRED, "src/other.py", "12: Location does not name the version's file"),
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
    row = f"| a | {{}} | <!-- r:{FAST} burst --> |\n"
    (project / "docs" / "knowledge").mkdir(parents=True)
    (project / "README.md").write_text("Answers in 0.5 s.\n\n| x | us | r |\n|---|---|---|\n" + row.format("220.2"))
    assert check(project) == ([], [])
    (project / "docs" / "knowledge" / "a.md").write_text("| x | us | r |\n|---|---|---|\n" + row.format("300"))
    failures, _ = check(project)
    assert failures == [
        "docs/knowledge/a.md:3: 300 us differs from its record: burst is 220.20 us in r:aaaa11112222 burst"
    ]
    assert check(project, [project / "README.md"]) == ([], [])


def test_a_row_names_the_kernel_of_its_record(project: Path) -> None:
    head = "| cell | kernel | us | r |\n|---|---|---|---|\n"
    page = project / "README.md"
    page.write_text(head + f"| a | triton/flash_mla_v1 | 220.2 | <!-- r:{FAST} burst --> |\n")
    assert check(project) == ([], [])
    page.write_text(head + f"| a | triton/flash_mla_v16 | 220.2 | <!-- r:{FAST} burst --> |\n")
    failures, _ = check(project)
    assert failures == [
        f"README.md:3: r:{FAST} burst is a record of triton/flash_mla_v1, and its row names triton/flash_mla_v16"
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
