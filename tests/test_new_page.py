"""docs/new.md: its files, pasted into a copy of the checkout, are found, right, compiled, swept and written down."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import mla_var3
from mla_var3 import paths

pytest.importorskip("triton", reason="triton is not installed")

KERNEL = "src/mla_var3/kernel/triton/gate/output_gate/output_gate/output_gate.py"
#: (return code, standard output, standard error) of `mla-var3 WORDS`.
Run = Callable[..., tuple[int, str, str]]


def files(page: str) -> dict[str, str]:
    """Path and text of each file that the page shows: a path in backquotes and a colon, then a block of code."""
    return dict(re.findall(r"^`([^`\n]+)`:\n\n```\w+\n(.*?)^```", page, re.M | re.S))


@pytest.fixture(scope="module")
def page(repo_root: Path) -> str:
    return (repo_root / "docs" / "new.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def checkout(page: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("new")
    package, ignored = root / "src" / "mla_var3", shutil.ignore_patterns("__pycache__")
    shutil.copytree(Path(mla_var3.__file__).parent, package, ignore=ignored)
    shutil.copytree(paths.conf_dir(), root / "conf")  # what makes the folder a checkout
    for path, text in files(page).items():
        place = root / path
        assert not place.exists(), f"{path} is a file of the project already"
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(text, encoding="utf-8")
    (more,) = re.findall(r"^```bash\n(.*?)^```", page, re.M | re.S)
    subprocess.run(["bash", "-c", more], cwd=root, check=True)
    assert all((folder / "__init__.py").is_file() for folder in list((root / KERNEL).parents)[:3])
    found = package / "catalogue" / "libraries.py"
    text = found.read_text(encoding="utf-8")
    look, how = re.findall(r'^```python\n(    "\w+": .*?\n)```', page, re.M | re.S)
    for name, entry in (("_LOOK", look), ("_HOW", how)):
        head, opening, rest = text.partition(re.search(rf"^{name}: .*\{{\n", text, re.M)[0])  # type: ignore[index]
        text = head + opening + entry + rest
    found.write_text(text, encoding="utf-8")
    return root


@pytest.fixture(scope="module")
def run(checkout: Path) -> Run:
    env = {**os.environ, "PYTHONPATH": str(checkout / "src"), "PYTHONDONTWRITEBYTECODE": "1"}

    def mla_var3_of_the_copy(*words: str) -> tuple[int, str, str]:
        done = subprocess.run(
            [sys.executable, "-m", "mla_var3.cli", *words],
            env=env, cwd=checkout, capture_output=True, text=True, timeout=240, check=False,
        )  # fmt: skip
        return done.returncode, done.stdout, done.stderr

    return mla_var3_of_the_copy


@pytest.mark.slow
def test_every_command_of_the_page(page: str, checkout: Path, run: Run) -> None:
    blocks = re.findall(r"^```console\n(.*?)^```", page, re.M | re.S)
    commands = [shlex.split(line) for block in blocks for line in block.splitlines()]
    assert [words[1] for words in commands] == ["check", "compile", "list", "sweep", "devlog", "devlog"]
    said = {}
    for program, *words in commands:
        assert program == "mla-var3"
        code, out, err = run(*words)
        said[" ".join(words[:2])] = out
        # Only the last one has something to complain of: what a person has to write.
        assert code == (1 if words == ["devlog", "check"] else 0), (words, out, err)
    assert re.search(r"^triton/output_gate r\d+_w512: passed, 4 cases", said["check triton/output_gate"], re.M)
    assert "triton/output_gate" in said["compile triton/output_gate"]
    assert re.search(r"^triton/output_gate +gate ", said["list kernels"], re.M)
    assert re.search(r"^peer/torch_compile_output_gate +gate ", said["list kernels"], re.M)
    records = list(checkout.glob("out/results/*/*-output_gate.jsonl")) + list(
        checkout.glob("results/*/*-output_gate.jsonl")
    )
    assert records, "the sweep wrote no record"
    entry = checkout / "devlogs" / "output_gate" / "triton-v0.md"
    todo = [line for line in said["devlog check"].splitlines() if line.startswith(f"{entry.relative_to(checkout)}:")]
    assert "## Hypothesis" in entry.read_text(encoding="utf-8") and any("TODO" in line for line in todo)


def test_the_check_of_the_page_finds_a_wrong_kernel(checkout: Path, run: Run) -> None:
    file = checkout / KERNEL
    right = file.read_text(encoding="utf-8")
    assert right.count("mask=inside, other=0.0") == 2 and right.count("tl.sigmoid(gate)") == 1
    try:
        for old, new in (("tl.sigmoid(gate)", "tl.sigmoid(gate * 1.02)"), ("* BLOCK +", "* BLOCK // 2 +")):
            file.write_text(right.replace(old, new), encoding="utf-8")
            # More elements than one program takes, so that a wrong start of the others is seen.
            code, out, err = run("check", "triton/output_gate", "--device", "cpu", "--problem", "rows=5,width=1000")
            assert code == 1 and "WRONG" in out, (old, out, err)
    finally:
        file.write_text(right, encoding="utf-8")


#: File, what stands there, what is put in its place, and what is said of that.
WORKLOAD, RETURN = "src/mla_var3/workload/gate.py", "return (x.double() * gate.double().sigmoid(),)"
MISTAKES = {
    "import": (
        WORKLOAD,
        "DISTRIBUTIONS = (",
        "DISTRIBUTIONS = faktor(",
        r"NameError: .*\n  src/.*/gate.py:\d+\n    DI",
    ),
    "oracle": (WORKLOAD, ".sigmoid(),)", ".sigmoidd(),)", r"mean 'sigmoid'\?\n  src/.*/gate.py:\d+, in reference\n"),
    "field": (WORKLOAD, "    rebound=rebound,\n", "", r"'rebound'\n  docs/new.md has .*\n  src/.*/gate.py:\d+\n"),
    "method": (WORKLOAD, "def output_bytes(", "def bytes_out(", r"GateProblem of workload gate lacks output_bytes: "),
    "tuple": (WORKLOAD, RETURN, "return x.double()", r"gate returns a Tensor: return a tuple of tensors, \(out\)."),
    "count": (WORKLOAD, RETURN, "return x.double(), gate", r"returns 2 tensors: return one for each output, \(out\)."),
    "precision": (
        WORKLOAD,
        RETURN,
        "return (x * gate.sigmoid(),)",
        r"gives out in torch.bfloat16: compute it in flo",
    ),
    "bounds": (WORKLOAD, '{"out": Bound', '{"o": Bound', r"bounds of workload gate lacks out: return one Bound"),
    "plan": (
        KERNEL,
        "def plan_empty(",
        "def empty_plan(",
        r"OutputGatePlan in output_gate.py lacks plan_empty: docs",
    ),
    "requires": (
        KERNEL,
        "    requires = ",
        "    wants = ",
        r"OutputGatePlan in output_gate.py lacks requires: docs",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("what", MISTAKES)
def test_a_mistake_is_told_at_its_own_place(what: str, checkout: Path, run: Run) -> None:
    name, old, new, said = MISTAKES[what]
    file = checkout / name
    right = file.read_text(encoding="utf-8")
    assert right.count(old) == 1
    try:
        file.write_text(right.replace(old, new), encoding="utf-8")
        code, out, err = run("check", "triton/output_gate", "--device", "cpu")
    finally:
        file.write_text(right, encoding="utf-8")
    assert code == 2 and re.search(said, err), (out, err)
    assert "Traceback" not in err


def test_the_files_are_as_the_linter_likes_them(page: str, checkout: Path, repo_root: Path) -> None:
    shutil.copy(repo_root / "pyproject.toml", checkout)
    sources = [path for path in files(page) if path.endswith(".py")]
    assert len(sources) == 3
    for words in (["check"], ["format", "--check"]):
        done = subprocess.run(
            [sys.executable, "-m", "ruff", *words, "--no-cache", *sources],
            cwd=checkout, capture_output=True, text=True, timeout=60, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.gpu
def test_the_kernel_and_the_library_are_right_on_a_gpu(run: Run) -> None:
    code, out, err = run("check", "triton/output_gate", "peer/torch_compile_output_gate", "--device", "cuda")
    assert code == 0 and out.count(": passed, ") == 2, (out, err)
