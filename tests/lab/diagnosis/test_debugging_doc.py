"""docs/debugging.md: every patch applies to the sources as they are, compiles, and does what the page says of it."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

VERSION = Path("src/mla_var3/kernel/cute_python/mla/flash_mla/flash_mla/flash_mla.py")
#: Compiles kernels of the version that PYTHONPATH leads to, each into a folder of its name.
COMPILE = """
import sys
from pathlib import Path
from mla_var3.device import Device
from mla_var3.catalogue.registry import KernelId, get_plan
from mla_var3.workload.decode import MlaProblem
h200 = Device.get("h200")
plan = get_plan(KernelId.parse("cute-dsl/flash_mla"))(MlaProblem(b=2, t=300), None, h200)
stages = dict(zip(("flash_mla", "combine"), plan.plan_empty().stages, strict=True))
for name in sys.argv[2:]:
    stages[name].compile(Path(sys.argv[1]) / name, h200, keep=("sass",))
"""
#: Heading of each patch -> the kernel that it changes.
PATCHED = {
    "printing": "combine", "printing2": "combine", "memcheck": "flash_mla", "racecheck": "flash_mla",
    "synccheck": "flash_mla", "hang": "flash_mla",
}  # fmt: skip


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


def sass(tree: Path, out: Path, *kernels: str) -> tuple[list[list[str]], str]:
    """(instructions of each kernel, what was printed)."""
    done = subprocess.run(
        [sys.executable, "-c", COMPILE, str(out), *kernels], capture_output=True, text=True, check=False,
        env={"PYTHONPATH": str(tree / "src"), "PATH": "/usr/bin:/bin", "HOME": str(out.parent)}, timeout=240,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    texts = [(out / kernel / f"{kernel}.sass").read_text() for kernel in kernels]
    return [re.findall(r"^\s+/\*[0-9a-f]{4,}\*/\s+(.*?)\s*;", text, re.MULTILINE) for text in texts], done.stdout


def test_every_patch_applies_compiles_and_shows(page: str, repo_root: Path, tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    shutil.copytree(repo_root / "src", tree / "src", ignore=shutil.ignore_patterns("__pycache__"))
    found = patches(page)
    assert set(found) == set(PATCHED)
    kernels = ("flash_mla", "combine")
    code = dict(zip(kernels, sass(tree, tmp_path / "clean", *kernels)[0], strict=True))
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
                (code[name],), said[name] = sass(tree, tmp_path / name, PATCHED[name])

    def count(name: str, pattern: str) -> int:
        return sum(bool(re.search(rf"{pattern}(?![.\w])", text)) for text in code[name])

    assert said["printing"].startswith("partial_out: (?,?,1,128,512):") and said["printing"].strip() in page
    assert code["printing"] == code["combine"]  # tracing prints change no code
    assert "has one `CALL.ABS`, that of `vprintf`, where it had none" in page
    assert [sum("CALL.ABS" in line for line in code[name]) for name in ("combine", "printing2")] == [0, 1]
    assert "3 VIADDMNMX where it had 5, and 10 UISETP.LT.AND where it had 12" in page
    minima = ("VIADDMNMX", "UISETP.LT.AND")
    assert [[count(name, one) for one in minima] for name in ("flash_mla", "memcheck")] == [[5, 12], [3, 10]]
    barrier = r"BAR\.SYNC\.DEFER_BLOCKING"
    consumers = rf"{barrier} 0x5, 0x100"
    assert (count("flash_mla", consumers), count("racecheck", consumers)) == (3, 1)
    assert not count("flash_mla", rf"@!?U?P\d {barrier}.*")
    assert [count("synccheck", rf"^@!P\d {barrier} {which}, 0x80") for which in ("0x6", "0x7")] == [2, 2]
    assert (count("hang", consumers), count("hang", rf"{barrier} 0x5, 0x120")) == (1, 2)


def test_the_listing_of_the_page_is_that_of_the_sources(page: str, repo_root: Path) -> None:
    folder = repo_root / "src" / "mla_var3" / "kernel" / "cute_python"
    lines = {path.name: path.read_text().splitlines() for path in (repo_root / VERSION, folder / "prims" / "sync.py")}
    cited = re.findall(r"File \"[^\"]*/(\w+\.py)\", line (\d+)", page)
    assert [lines[name][int(number) - 1].strip() for name, number in cited] == [
        "row_values[wgmma.acc_row(self.thread, r)] = value",
        "cute.arch.barrier(barrier_id=int(barrier), number_of_threads=threads)",
        "w.row_sum[r] = w.row_sum[r] + sums[1 - w.me][lane_row + 8 * r]",
    ]


def test_the_links_and_commands_of_the_page_exist(page: str, repo_root: Path) -> None:
    anchors = {
        re.sub(r"[^\w -]", "", h.lower()).replace(" ", "-") for h in re.findall(r"^## (.+)$", page, re.MULTILINE)
    }
    for target in re.findall(r"\]\(([^)]+)\)", page):
        path, _, anchor = target.partition("#")
        assert (anchor in anchors) if not path else (repo_root / "docs" / path).is_file(), target
    from mla_var3 import cli

    commands = re.findall(r"`mla-var3 check ([^`]+--sanitize [^`]+)`", page)
    assert len(commands) == 3
    for line in commands:
        assert cli.parser_of("check").parse_args(line.split()).sanitize
