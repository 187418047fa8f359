"""Cloning a version: what is renamed, what stays, and that the copy passes its check untouched."""

from __future__ import annotations

import ast
import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

import mla_var3
from mla_var3.catalogue.registry import KernelId, all_kernels
from mla_var3.errors import UserError
from mla_var3.lab import clone
from mla_var3.workload.decode import MlaProblem

PACKAGE = Path(mla_var3.__file__).parent

MAIN = '''\
"""flash_toy: adds two numbers.

See mla_var3.kernel.torch.mla.flash_toy.flash_toy.parts and kernel/torch/mla/flash_toy/flash_toy/flash_toy.py.
"""

from __future__ import annotations

import flash_toy_elsewhere
from mla_var3.kernel.torch.lib.flash_toy import flash_toy_lib
from mla_var3.kernel.torch.mla.flash_toy.flash_toy.flash_toy_parts import (
    FlashToyHelper,
    flash_toy_part as part,
)
from . import flash_toy_parts

FLASH_TOY_LIMIT = 4  # FLASH_TOY_LIMIT bounds flash_toy


class FlashToyTiling:
    flash_toy = 1

    def flash_toy_method(self):
        return self.flash_toy


class FlashToyPlan(FlashToyHelper):
    """Plans `flash_toy` with FlashToyTiling; flash_toys are others."""


def flash_toy(x, y):
    """Name: flash_toy"""
    flash_toy_elsewhere.flash_toy(x)
    name = "flash_toy"
    return part(x) + flash_toy_parts.flash_toy_part(y) + flash_toy_lib(FLASH_TOY_LIMIT, name=f"flash_toy {name}")
'''
PARTS = "class FlashToyHelper:\n    pass\n\n\ndef flash_toy_part(x):\n    return x\n"


@pytest.fixture
def design(tmp_path: Path) -> Path:
    folder = tmp_path / "flash_toy" / "flash_toy"
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text("")
    (folder / "flash_toy.py").write_text(MAIN)
    (folder / "flash_toy_parts.py").write_text(PARTS)
    return folder


def test_renames_what_the_version_defines(design: Path) -> None:
    made = clone.clone_folder(design, "flash_toy", "flash_toy_v1")
    out = design.parent / "flash_toy_v1"
    assert sorted(p.name for p in out.iterdir()) == ["__init__.py", "flash_toy_v1.py", "flash_toy_v1_parts.py"]
    text = (out / "flash_toy_v1.py").read_text()
    ast.parse(text)
    for line in (
        '"""flash_toy_v1: adds two numbers.',
        "See mla_var3.kernel.torch.mla.flash_toy.flash_toy_v1.parts and kernel/torch",
        "kernel/torch/mla/flash_toy/flash_toy_v1/flash_toy_v1.py.",
        "import flash_toy_elsewhere",
        "from mla_var3.kernel.torch.lib.flash_toy import flash_toy_lib",
        "from mla_var3.kernel.torch.mla.flash_toy.flash_toy_v1.flash_toy_v1_parts import (",
        "    FlashToyV1Helper,",
        "    flash_toy_v1_part as part,",
        "from . import flash_toy_v1_parts",
        "FLASH_TOY_V1_LIMIT = 4  # FLASH_TOY_V1_LIMIT bounds flash_toy_v1",
        "class FlashToyV1Plan(FlashToyV1Helper):",
        "    def flash_toy_v1_method(self):",
        "        return self.flash_toy_v1",
        "    flash_toy_elsewhere.flash_toy(x)",
        '    name = "flash_toy_v1"',
        "def flash_toy_v1(x, y):",
        "Cloned from flash_toy; what this version changes: nothing yet.",
    ):
        assert line in text.splitlines() or line in text, line
    assert 'flash_toy_lib(FLASH_TOY_V1_LIMIT, name=f"flash_toy_v1 {name}")' in text
    assert "flash_toy_v1_parts.flash_toy_v1_part(y)" in text
    assert "flash_toys are others" in text
    assert made.names["FlashToyPlan"] == "FlashToyV1Plan"
    assert (design / "flash_toy.py").read_text() == MAIN, "the source stays as it was"


def test_clone_of_a_clone_counts_on(design: Path) -> None:
    clone.clone_folder(design, "flash_toy", "flash_toy_v1")
    clone.clone_folder(design.parent / "flash_toy_v1", "flash_toy_v1", "flash_toy_v2")
    text = (design.parent / "flash_toy_v2" / "flash_toy_v2.py").read_text()
    assert "class FlashToyV2Plan(FlashToyV2Helper):" in text
    assert "from mla_var3.kernel.torch.mla.flash_toy.flash_toy_v2.flash_toy_v2_parts import (" in text
    assert "import flash_toy_elsewhere" in text
    assert "V1" not in text


def test_target_version_names_and_numbers() -> None:
    base, first = KernelId("torch", "mla", "toy", 0), KernelId("torch", "mla", "toy", 1)
    family = [base, first]
    assert clone.target_version(base, None, family).version == 2
    for wanted in ("5", "v5", "toy_v5"):
        assert clone.target_version(base, wanted, family).version == 5
    with pytest.raises(UserError, match="torch/toy_v1 exists: choose another version, 2 is free"):
        clone.target_version(base, "1", family)
    with pytest.raises(UserError, match="write 3, v3 or toy_v3"):
        clone.target_version(base, "other", family)
    with pytest.raises(UserError, match="version 0 is the base"):
        clone.target_version(base, "0", family)


def test_numbers_of_retired_versions_are_not_free(monkeypatch: pytest.MonkeyPatch) -> None:
    gone = {f"torch/{name}": ("0123abcd", Path("x.md")) for name in ("toy_v4", "toy", "toy_more_v9", "atoy_v9")}
    monkeypatch.setattr(clone, "retired", lambda: gone)
    family = [KernelId("torch", "mla", "toy", 1)]
    assert clone.target_version(family[0], None, family).version == 5
    assert clone.target_version(family[0], "3", family).version == 3
    with pytest.raises(UserError, match="torch/toy_v4 is retired, and its devlog stays: choose another version, 5"):
        clone.target_version(family[0], "4", family)


def test_bad_sources_are_refused(design: Path) -> None:
    (design / "flash_toy_parts.py").write_text("def broken(:\n")
    with pytest.raises(UserError, match=r"flash_toy_parts.py, line 1: .*starts from code that runs"):
        clone.clone_folder(design, "flash_toy", "flash_toy_v1")
    assert not (design.parent / "flash_toy_v1").exists()
    (design.parent / "flash_toy_v1").mkdir()
    with pytest.raises(UserError, match="exists already"):
        clone.clone_folder(design, "flash_toy", "flash_toy_v1")


def test_dry_run_writes_nothing(design: Path) -> None:
    made = clone.clone_folder(design, "flash_toy", "flash_toy_v1", dry_run=True)
    assert len(made.files) == 3
    assert not (design.parent / "flash_toy_v1").exists()


@pytest.mark.parametrize("language", ["torch", "triton", "cutile-dsl", "cute-dsl"])
def test_every_real_version_clones_into_code_that_parses(language: str, tmp_path: Path) -> None:
    kernels = [k for k in all_kernels() if k.language == language]
    if not kernels:
        pytest.skip(f"no {language} kernel in this tree")
    for kernel in kernels:
        folder = tmp_path / kernel.design / kernel.module_name
        shutil.copytree(kernel.path.parent, folder, ignore=shutil.ignore_patterns("__pycache__"))
        new = f"{kernel.design}_v{900 + kernel.version}"
        made = clone.clone_folder(folder, kernel.module_name, new)
        text = (folder.parent / new / f"{new}.py").read_text()
        assert f"{clone.camel(new)}Plan" in text or not any("Plan" in name for name in made.names)


@pytest.mark.parametrize("language", ["torch", "triton"])
def test_a_clone_passes_its_check_untouched(language: str, tmp_path: Path) -> None:
    kernels = [k for k in all_kernels() if k.language == language and k.layer == "mla"]
    if not kernels:
        pytest.skip(f"no {language} kernel in this tree")
    copy = tmp_path / "mla_var3"
    shutil.copytree(PACKAGE, copy, ignore=shutil.ignore_patterns("__pycache__"))
    env = {**os.environ, "PYTHONPATH": str(tmp_path), "PYTHONDONTWRITEBYTECODE": "1"}

    def run(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, *words], env=env, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False
        )

    label = kernels[0].label
    made = run("-m", "mla_var3.cli", "clone", label, "77")
    assert made.returncode == 0, made.stderr
    new = f"{language}/{kernels[0].design}_v77"
    assert new in made.stdout
    small = ["--b", "1", "--t", "40", "--h", "4", "--device", "cpu", "--quick", "--cases", "own"]
    checked = run("-m", "mla_var3.cli", "check", new, *small)
    assert checked.returncode == 0, checked.stdout + checked.stderr
    assert "passed" in checked.stdout


# ---------------------------------------------------------------- a copy whose main loop is changed
ORIGINAL, COPY = "cute-dsl/flash_mla_v24", "cute-dsl/flash_mla_v77"
PROBLEM = ("--b", "128", "--h", "16", "--device", "h200")
#: What a reader changes in the copied file: (old text, new text, how often it stands there).
CHANGES = {
    # The ring of KV panels: 20 of them, where as many as fit would be 22.
    "stages": (("    num_pipeline_stages: int = 0\n", "    num_pipeline_stages: int = 20\n", 1),),
    # The products of a tile's latent panels with P, and so the freeing of panels, from the last panel to the first.
    "order": (
        ("ring_at(stage, phase, self.me * count + i, ", "ring_at(stage, phase, self.me * count + count - 1 - i, ", 2),
        ("self.acc_o[i], self.frag_v[", "self.acc_o[count - 1 - i], self.frag_v[", 1),
    ),
}
SOURCES = """
import json
from mla_var3.catalogue import registry
print(json.dumps({kernel.label: registry.source_hash(kernel) for kernel in registry.all_kernels()}))
"""


@dataclass(frozen=True)
class Checkout:
    """A copy of the package in a folder of its own, with a clone in it."""

    root: Path

    def run(self, *words: str) -> str:
        environment = {**os.environ, "PYTHONPATH": str(self.root), "XDG_CACHE_HOME": str(self.root / "cache")}
        done = subprocess.run(
            [sys.executable, *words], env=environment, cwd=self.root, capture_output=True, text=True, timeout=240,
            check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def sources(self) -> dict[str, str]:
        found: dict[str, str] = json.loads(self.run("-c", SOURCES))
        return found

    def compile(self, label: str) -> str:
        """The digest of what a version compiles to."""
        text = self.run("-m", "mla_var3.cli", "compile", label, *PROBLEM)
        found = re.findall(rf"^code +{re.escape(label)} \S+: ([0-9a-f]{{16}})$", text, re.MULTILINE)
        assert len(found) == 1, text
        return str(found[0])

    def diff(self) -> tuple[list[str], str]:
        """(digests of the original and the copy, what `diff` says of them)."""
        text = self.run("-m", "mla_var3.cli", "diff", ORIGINAL, COPY, *PROBLEM, "--lines", "0")
        row = re.search(r"^\| code +\|(.*)$", text, re.MULTILINE)
        said = re.search(r"^(Same|Other) code: .*$", text, re.MULTILINE)
        assert row and said, text
        return re.findall(r"\b[0-9a-f]{16}\b", row[1]), said[0]


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Checkout:
    pytest.importorskip("cutlass", reason="nvidia-cutlass-dsl is not installed")
    root = tmp_path_factory.mktemp("checkout")
    shutil.copytree(PACKAGE, root / "mla_var3", ignore=shutil.ignore_patterns("__pycache__"))
    made = Checkout(root)
    before = made.sources()
    assert f"made {COPY}" in made.run("-m", "mla_var3.cli", "clone", ORIGINAL, "77")
    assert made.sources() == {**before, COPY: made.sources()[COPY]}
    return made


@pytest.fixture(scope="module")
def original() -> str:
    """The digest that results/code.json has of the version that is copied."""
    known = json.loads((Path(__file__).parents[2] / "results" / "code.json").read_text())
    here = MlaProblem(b=128, h=16).problem_class().key()
    (digest,) = [x["digest"] for x in known if (x["kernel"], x["problem_class"]) == (ORIGINAL, here)]
    return str(digest)


@pytest.mark.slow
def test_an_untouched_copy_is_the_same_code(checkout: Checkout, original: str) -> None:
    assert checkout.diff() == ([original, original], "Same code: records of one are records of the other.")


@pytest.mark.slow
@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_copy_is_other_code_and_nothing_else_moves(checkout: Checkout, original: str, change: str) -> None:
    file = next(checkout.root.rglob("flash_mla_v77.py"))
    before, untouched = checkout.sources(), file.read_text()
    text = untouched
    for old, new, count in CHANGES[change]:
        assert text.count(old) == count, old
        text = text.replace(old, new)
    try:
        file.write_text(text)
        after = checkout.sources()
        assert {label for label in after if after[label] != before[label]} == {COPY}
        if change == "stages":
            assert checkout.compile(COPY) != original
        else:
            digests, said = checkout.diff()
            assert digests[0] == original != digests[1]
            assert said.startswith("Other code: flash_mla_v24: machine code")
    finally:
        file.write_text(untouched)
