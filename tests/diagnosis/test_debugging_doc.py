"""docs/debugging.md: every patch applies to the sources as they are, compiles, and does what the page says of it."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

#: Compiles the join of the version that PYTHONPATH leads to.
COMPILE = """
import sys
from pathlib import Path
from mla_var3.device import Device
from mla_var3.kernel.registry import KernelId, get_plan
from mla_var3.problem import MlaProblem
h200 = Device.get("h200")
plan = get_plan(KernelId.parse("cute-dsl/flash_mla_v1"))(MlaProblem(b=2, t=300), None, h200)
plan.plan_empty().stages[1].compile(Path(sys.argv[1]), h200, keep=("sass",))
"""


@pytest.fixture(scope="module")
def page(repo_root: Path) -> str:
    return (repo_root / "docs" / "debugging.md").read_text()


def patches(page: str) -> dict[str, str]:
    """Heading -> its patch; of two below one heading, the second gets a 2."""
    found: dict[str, str] = {}
    for match in re.finditer(r"^## ([^\n]+)$|^```diff\n(.*?)^```$", page, re.MULTILINE | re.DOTALL):
        if match[1]:
            heading = match[1].split(":")[0].lower()
        else:
            found[heading + ("2" if heading in found else "")] = match[2]
    return found


def sass(tree: Path, out: Path) -> tuple[str, str]:
    """(SASS of the join, what was printed)."""
    done = subprocess.run(
        [sys.executable, "-c", COMPILE, str(out)], capture_output=True, text=True, check=False,
        env={"PYTHONPATH": str(tree / "src"), "PATH": "/usr/bin:/bin", "HOME": str(out.parent)}, timeout=240,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    return (out / "combine_groups4.sass").read_text(), done.stdout


def test_every_patch_applies_compiles_and_shows(page: str, repo_root: Path, tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    shutil.copytree(repo_root / "src", tree / "src", ignore=shutil.ignore_patterns("__pycache__"))
    found = patches(page)
    assert set(found) == {"printing", "printing2", "memcheck", "racecheck", "synccheck", "hang"}
    code: dict[str, str] = {"clean": sass(tree, tmp_path / "clean")[0]}
    said = {}
    for name, text in found.items():
        (tmp_path / "fault.diff").write_text(text)
        for back in ([], ["-R"]):
            done = subprocess.run(
                ["git", "apply", *back, str(tmp_path / "fault.diff")],
                cwd=tree,
                capture_output=True,
                text=True,
                check=False,
            )
            assert done.returncode == 0, f"{name}: {done.stderr}"
            if not back:
                code[name], said[name] = sass(tree, tmp_path / name)

    def count(name: str, opcode: str) -> int:
        return len(re.findall(rf"\s{opcode}\b", code[name]))

    assert "partial_out: (?,?,1,128,512):" in said["printing"] and said["printing"].strip() in page
    assert code["printing"] == code["clean"]  # tracing prints change no code
    assert (count("clean", "BAR.SYNC"), count("racecheck", "BAR.SYNC")) == (2, 1)
    assert (count("clean", "ISETP"), count("memcheck", "ISETP")) == (23, 15)
    assert re.search(r"@!P\d BAR\.SYNC", code["synccheck"]) and not re.search(r"@!?P\d BAR\.SYNC", code["clean"])
    assert "BAR.SYNC.DEFER_BLOCKING 0x1, 0x220" in code["hang"] and "BAR.SYNC.DEFER_BLOCKING 0x1," not in code["clean"]
    lines = {name: len(re.findall(r"^\s+/\*[0-9a-f]{4}\*/", text, re.MULTILINE)) for name, text in code.items()}
    assert (lines["clean"], lines["printing2"]) == (512, 536)


def test_the_links_and_commands_of_the_page_exist(page: str, repo_root: Path) -> None:
    anchors = {
        re.sub(r"[^\w -]", "", h.lower()).replace(" ", "-") for h in re.findall(r"^## (.+)$", page, re.MULTILINE)
    }
    for target in re.findall(r"\]\(([^)]+)\)", page):
        path, _, anchor = target.partition("#")
        assert (anchor in anchors) if not path else (repo_root / "docs" / path).is_file(), target
    from mla_var3 import cli

    for line in re.findall(r"^mla-var3 check (.+)$", page, re.MULTILINE):
        assert cli._parser("check").parse_args(line.split()).sanitize
