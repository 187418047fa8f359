"""Names of files and kernels in pages and configs: what nothing here has is found, what a page makes is not."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from mla_var3.catalogue import registry
from mla_var3.lab.devlog import named
from mla_var3.lab.devlog.check import check

LABELS = {"triton/rmsnorm", "cute-dsl/flash_mla_v23", "peer/fa4"}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for name in ("src/one.py", "conf/experiment/decode.yaml", "docs/here.md"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("")
    return tmp_path


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("see `src/two.py`.", "src/two.py does not exist"),
        ("(docs/gone.md)", "docs/gone.md does not exist"),
        ("# conf/experiment/gone.yaml says why", "conf/experiment/gone.yaml does not exist"),
        ("`tests/test_gone.py`", "tests/test_gone.py does not exist"),
        ("`src/*/two.py`", "src/*/two.py does not exist"),
        ("see docs/sub/README.md", "docs/sub/README.md does not exist"),
        ("as triton/rmsnorn does", "kernel triton/rmsnorn does not exist: did you mean"),
        ('patterns: ["cute-dsl/flash_attention*"]', "kernel cute-dsl/flash_attention* does not exist"),
        ("`peer/fa5`", "kernel peer/fa5 does not exist"),
    ],
)
def test_what_does_not_exist_is_found(root: Path, text: str, says: str) -> None:
    (found,) = named.check(f"first\n{text}\n", root, LABELS)
    assert found.line == 2 and found.message.startswith(says)


@pytest.mark.parametrize(
    "text",
    [
        "`src/one.py`, docs/here.md and conf/*/decode.yaml",
        "[page](../docs/here.md#part), https://example.org/docs/gone.md",
        "`conf/experiment/NAME.yaml`, devlogs/<design>/, src/mla_var3/kernel/peer/LAYER.py",
        "cd Other && pytest tests/test_theirs.py",
        "`Other/tests/test_theirs.py`",
        "triton/rmsnorm, cute-dsl/flash_mla_v23, `peer/NAME`",
        'patterns: ["cute-dsl/flash_mla*", "*/rmsnorm", "peer/*"]',
        "torch/lib/libtorch.so and mla-var3 compile",
    ],
)
def test_what_exists_or_stands_for_something_is_let_through(root: Path, text: str) -> None:
    assert not list(named.check(text, root, LABELS))


def test_what_a_page_shows_and_clones_is_made_by_it(root: Path) -> None:
    kernel = "src/mla_var3/kernel/triton/gate/gate/gate/gate.py"
    shown = f"`{kernel}`:\n\n```python\nx = 1\n```\n\n"
    peers = '`src/mla_var3/kernel/peer/gate.py`:\n\n```python\nclass A:\n    peer = "gate_lib"\n```\n\n'
    uses = f"mla-var3 check triton/gate peer/gate_lib; edit {kernel}"
    assert not list(named.check(shown + peers + uses, root, LABELS))
    assert len(list(named.check(uses, root, LABELS))) == 3
    after = max(k.version for k in registry.all_kernels() if (k.language, k.design) == ("triton", "rmsnorm")) + 1
    clones = f"mla-var3 clone triton/rmsnorm\nmla-var3 check triton/rmsnorm_v{after}"
    assert not list(named.check(clones, root, LABELS))
    (found,) = named.check(clones.replace(f"_v{after}", f"_v{after + 1}"), root, LABELS)
    assert found.line == 2


def test_a_retired_entry_may_name_what_its_commit_has(root: Path) -> None:
    text = "with `src/lib/merge.py`"
    assert not list(named.check(text, root, LABELS, lambda path: path == "src/lib/merge.py"))
    assert not list(named.check(text, root, LABELS, lambda path: None))  # no history to ask
    (found,) = named.check(text, root, LABELS, lambda path: False)
    assert found.message == "src/lib/merge.py does not exist, neither here nor at the commit of `code`"


def test_a_version_with_an_entry_may_be_named(root: Path) -> None:
    (root / "devlogs" / "mine").mkdir(parents=True)
    (root / "devlogs" / "mine" / "triton-v3.md").write_text("")
    assert named.labels_of(root) >= {"triton/mine_v3", "cute-dsl/flash_mla_v23", "cute-dsl/flash_mla_v8"}


# ---------------------------------------------------------------- in `devlog check`
@pytest.mark.parametrize(
    "place", ["CONTRIBUTING.md", "README.md", "docs/deep/page.md", "docs/results/page.md", "conf/kernels/all.yaml"]
)
def test_the_check_reads_pages_and_configs(project: Path, place: str) -> None:
    path = project / place
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("# about src/flash_mla_v1.py\n# and triton/flash_mla_v99\n")
    failures, _ = check(project)
    assert [line for line in failures if place in line] == [
        line for line in failures if line.startswith(f"{place}:2: kernel triton/flash_mla_v99 does not exist")
    ]
    assert any(place in line for line in failures)


def test_the_check_asks_the_commit_of_a_retired_entry(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def git(*words: str) -> str:
        options = ("-c", "user.name=x", "-c", "user.email=x@example.org")
        command = ["git", "-C", str(project), *options, *words]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    old = project / "src" / "lib.py"
    old.write_text("# shared\n")
    git("init", "-q")
    git("add", "src")
    git("commit", "-qm", "Add a version")
    commit = git("rev-parse", "HEAD")[:7]
    old.unlink()
    monkeypatch.setattr(registry, "all_kernels", lambda: ())
    (entry,) = (project / "devlogs").glob("*/*.md")
    text = entry.read_text().replace("devices:", f"code: {commit}\ndevices:")
    for name, gone in (("src/lib.py", False), ("src/lab.py", True)):
        entry.write_text(text.replace("Keys are loaded", f"With `{name}`, keys are loaded"))
        failures, _ = check(project)
        assert any(f"{name} does not exist, neither here nor" in line for line in failures) == gone, failures
