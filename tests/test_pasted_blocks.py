"""The console blocks of README.md and CONTRIBUTING.md, pasted into a shell of a copy of this checkout.

Stand-ins are `git clone` (the copy), `make` (a dry run, which leaves a `.venv` behind), the editor (one change), and
what needs a GPU or hours (`pasted_command`). Every other command is the real one.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from mla_var3.catalogue import registry

ADD = "Add a version"
NOT_COPIED = (".git", ".venv", "out", "__pycache__", ".*_cache", ".hypothesis", "dist", "build", "node_modules")
LIMIT_S = 280

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        bool(registry.missing("triton") or registry.missing("cute-dsl")), reason="needs triton and CuTe DSL"
    ),
]


def blocks(page: Path) -> dict[str, str]:
    """The console blocks of a page, those below one heading together, by that heading."""
    found: dict[str, str] = {}
    for part in re.split(r"^#+ ", page.read_text(encoding="utf-8"), flags=re.M):
        if inside := re.findall(r"^```console\n(.*?)^```", part, re.M | re.S):
            found[part.splitlines()[0]] = "".join(inside)
    return found


ROOT = Path(__file__).resolve().parent.parent
README, CONTRIBUTING = blocks(ROOT / "README.md"), blocks(ROOT / "CONTRIBUTING.md")

#: Packages may come by PYTHONPATH too: behind the copy's sources.
INHERITED = "".join(f":{part}" for part in os.environ.get("PYTHONPATH", "").split(os.pathsep) if part)


@dataclass(frozen=True)
class Ran:
    """One command of a block, as it is written but for its comment. output: what it printed, on both streams."""

    command: str
    status: int
    output: str


@dataclass(frozen=True)
class Shell:
    """A place to paste blocks into. copy: of this checkout. folder: where the shell starts."""

    copy: Path
    folder: Path
    env: dict[str, str]

    def paste(self, block: str) -> list[Ran]:
        """Runs the lines of a block in one shell, one after the other, whatever they end with."""
        lines = block.replace("\\\n", " ").splitlines()
        # As an interactive shell does, which goes on behind a command that failed.
        script = "".join(f"echo '@@ {n}'\n{line}\necho \"@@ = $?\"\n" for n, line in enumerate(lines))
        done = subprocess.run(
            ["bash", "-c", script], cwd=self.folder, env=self.env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, text=True, timeout=LIMIT_S, check=False,
        )  # fmt: skip
        found = re.findall(r"^@@ (\d+)\n(.*?)^@@ = (\d+)$", done.stdout, re.M | re.S)
        assert [int(n) for n, _, _ in found] == list(range(len(lines))), done.stdout
        return [Ran(lines[int(n)].partition("  #")[0], int(status), output) for n, output, status in found]


def executable(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/bash\n{text}\n")
    path.chmod(0o755)


@pytest.fixture
def shell(tmp_path: Path) -> Shell:
    """A shell without a GPU, whose `mla-var3` is the copy's once the copy's .venv is active."""
    copy, tools, start = tmp_path / "checkout", tmp_path / "tools", tmp_path / "start"
    shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(*NOT_COPIED), symlinks=True)
    start.mkdir()
    python, git, make = (shlex.quote(shutil.which(name) or "") for name in (sys.executable, "git", "make"))
    # `git clone URL FOLDER` brings the copy; `make TARGET` does nothing but what later lines need of it.
    executable(
        tools / "git", f'if [ "$1" = clone ]; then cp -r {shlex.quote(str(copy))} "$3"; else exec {git} "$@"; fi'
    )
    make = f"{make} -n" if make != "''" else 'grep -q "^$1:" Makefile && echo'
    venv = (
        f'mkdir -p .venv/bin && echo "export PATH=$PWD/.venv/bin:\\$PATH PYTHONPATH=$PWD/src{INHERITED}" '
        "> .venv/bin/activate && "
        "printf '#!/bin/bash\\nexec %s %s \"$@\"\\n' "
        f'{python} "$PWD/tests/pasted_command.py" > .venv/bin/mla-var3 && chmod +x .venv/bin/mla-var3'
    )
    executable(tools / "make", f'{make} "$@" > /dev/null && {venv}')
    executable(tools / "python3", f'exec {python} "$@"')
    executable(tools / "editor", f'exec {python} {shlex.quote(str(tools / "edit.py"))} "$@"')
    (tools / "edit.py").write_text(
        "import sys\nfrom pathlib import Path\n(path,) = map(Path, sys.argv[1:])\ntext = path.read_text()\n"
        "path.write_text(text.replace('columns // 1024', 'columns // 512') + '\\n# edited\\n')\n"
    )
    env = {
        "PATH": f"{tools}:{os.defpath}", "HOME": str(tmp_path), "EDITOR": str(tools / "editor"), "NO_COLOR": "1",
        "COLUMNS": "200", "CUDA_VISIBLE_DEVICES": "", "PYTHONDONTWRITEBYTECODE": "1", "PYTHONWARNINGS": "ignore",
        "OMP_NUM_THREADS": "1",
    }  # fmt: skip
    return Shell(copy, start, env)


def in_checkout(shell: Shell, **env: str) -> Shell:
    """The shell in the copy, after its `make quickstart`."""
    shell = Shell(shell.copy, shell.copy, {**shell.env, **env})
    assert [ran.status for ran in shell.paste("make quickstart")] == [0]
    return shell


def active(shell: Shell) -> Shell:
    """The shell with the copy's .venv active."""
    path = f"{shell.copy}/.venv/bin:{shell.env['PATH']}"
    return Shell(
        shell.copy, shell.folder, {**shell.env, "PATH": path, "PYTHONPATH": f"{shell.copy / 'src'}{INHERITED}"}
    )


def said(ran: list[Ran], begin: str) -> Ran:
    (found,) = [one for one in ran if one.command.startswith(begin)]
    return found


def added(ran: list[Ran], shell: Shell, checked: int) -> None:
    """What "Add a version" promises of its commands; checked: the status of a check."""
    wanted = [checked if one.command.startswith("mla-var3 check") else 0 for one in ran]
    assert [one.status for one in ran] == wanted, [one for one in ran if one.status]
    version = said(ran, "mla-var3 check").command.split()[2]
    assert f"made {version}\n  {shell.copy}/src/" in said(ran, "mla-var3 clone").output
    assert (shell.copy / said(ran, "${EDITOR").command.split()[1]).read_text().endswith("\n# edited\n")
    assert version in said(ran, "mla-var3 compile").output
    assert "Same code: records of one are records of the other." in said(ran, "mla-var3 diff").output
    assert version in said(ran, "mla-var3 bench").output
    entry = shell.copy / said(ran, "mla-var3 devlog new").output.split("\n")[-2].partition(": ")[0]
    assert entry.is_file() and entry.is_relative_to(shell.copy)
    (records,) = (shell.copy / "results").glob("*/*-bench.jsonl")
    assert version.partition("_v")[2] in records.read_text()
    assert entry.with_suffix(".records").read_text().strip(), "the entry starts from what bench measured"


#: The README's version, and one that compiles in a fifth of the time, of which four of its commands compile.
FASTER = {"mla/flash_mla/": "norm/rmsnorm/", "flash_mla_v24": "rmsnorm", "flash_mla_v25": "rmsnorm_v1"}


def test_the_readmes_version_without_a_gpu(shell: Shell) -> None:
    """Its copy is made as it is written there, and the whole way is gone with a version that compiles faster."""
    assert ADD in README
    shell = in_checkout(shell)
    for file in (shell.copy / "results").glob("*/*.jsonl"):
        file.unlink()  # three of the commands read all records, which takes seconds each time
    activate, clone, edit, *_ = README[ADD].splitlines()
    _, made = shell.paste(f"{activate}\n{clone}\n")
    assert made.status == 0 and "made cute-dsl/flash_mla_v25\n" in made.output
    assert (shell.copy / edit.split()[-1]).is_file()
    block = README[ADD]
    for of_readme, faster in FASTER.items():
        assert of_readme in block
        block = block.replace(of_readme, faster)
    ran = shell.paste(block)
    added(ran, shell, checked=3)
    check = said(ran, "mla-var3 check")
    assert re.search(r"^cute-dsl/rmsnorm_v\d+ r\d+_w7168: compiled for h200, not checked", check.output, re.M)
    assert "passed" not in check.output
    assert "123" in next((shell.copy / "devlogs" / "rmsnorm").glob("cute-dsl-v1.md")).read_text()


@pytest.mark.gpu
def test_the_readmes_version_on_a_gpu(shell: Shell) -> None:
    shell = in_checkout(shell, CUDA_VISIBLE_DEVICES=os.environ.get("CUDA_VISIBLE_DEVICES", "0"))
    ran = shell.paste(README[ADD])
    added(ran, shell, checked=0)
    assert re.search(r"^cute-dsl/flash_mla_v\d+ \S+: passed, \d+ cases", said(ran, "mla-var3 check").output, re.M)


@pytest.mark.parametrize("heading", [heading for heading in README if heading != ADD])
def test_the_other_blocks_of_the_readme(heading: str, shell: Shell) -> None:
    shell = active(in_checkout(shell))
    for ran in shell.paste(README[heading]):
        assert ran.status == 0, ran
        if ran.command.startswith(("mla-var3 sweep", "mla-var3 profile")):
            assert re.search(r"^planned ([1-9]\d* cells, |\w+-dsl/)", ran.output, re.M), ran


def test_the_way_of_contributing(shell: Shell) -> None:
    ran = shell.paste("".join(CONTRIBUTING.values()))
    copy = shell.folder / "mla_var3"
    unfinished = {one.command: one.status for one in ran if one.status}
    assert unfinished == {"mla-var3 devlog check": 1}, [one for one in ran if one.status]
    assert f"made triton/rmsnorm_v1\n  {copy}/src/" in said(ran, "mla-var3 clone").output
    source = copy / said(ran, "${EDITOR").command.split()[1]
    assert "columns // 512" in source.read_text()
    check = said(ran, "mla-var3 check").output
    assert re.search(r"^triton/rmsnorm_v1 r3_w7168: passed, \d+ cases", check, re.M), check
    assert "triton/rmsnorm_v1" in said(ran, "mla-var3 compile").output
    diff = said(ran, "mla-var3 diff").output
    assert "Same code" not in diff and re.search(r"^\| registers.*\| +52 \| +32 \|", diff, re.M), diff
    assert {"triton/rmsnorm", "triton/rmsnorm_v1"} <= set(said(ran, "mla-var3 bench").output.split())
    entry = copy / "devlogs" / "rmsnorm" / "triton-v1.md"
    assert str(entry) in said(ran, "mla-var3 devlog new").output and "123" in entry.read_text()
    listed = [line for line in said(ran, "mla-var3 devlog check").output.splitlines() if line.startswith("devlogs/")]
    assert listed and all(line.startswith("devlogs/rmsnorm/triton-v1.md:") for line in listed)
    assert any("a TODO is left" in line for line in listed), listed


def test_the_checkout_itself_is_left_alone() -> None:
    """Runs last in this file: what the others made is in their copies."""
    for made in ("norm/rmsnorm/rmsnorm_v1", "mla/flash_mla/flash_mla_v25"):
        assert not list((ROOT / "src" / "mla_var3" / "kernel").glob(f"*/{made}/*.py"))
