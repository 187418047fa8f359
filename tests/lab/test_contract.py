"""The file contract: what is right passes, and everything else is told in one sentence, with its exit status."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mla_var3 import workload
from mla_var3.catalogue import registry
from mla_var3.check.judge import CheckReport
from mla_var3.errors import UserError
from mla_var3.lab import contract

GOOD = """
import torch

def kernel_fn(x, n):
    return torch.relu(x) * n

def reference_fn(x, n):
    return x.clamp(min=0) * n

def get_inputs():
    return [torch.randn(8, 5), 3]
"""


PARTS = {
    "kernel": "    return torch.relu(x) * n",
    "reference": "    return x.clamp(min=0) * n",
}


def _file(tmp_path: Path, text: str, **swaps: str) -> Path:
    for part, new in swaps.items():
        assert PARTS[part] in text
        text = text.replace(PARTS[part], new)
    path = tmp_path / "my_kernel.py"
    path.write_text(text)
    return path


def _verify(path: Path, *arguments: str) -> int:
    return contract.main_verify([str(path), *arguments])


def test_a_right_file_passes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert _verify(_file(tmp_path, GOOD)) == 0
    assert "right on 2 input sets" in capsys.readouterr().out


WRONG = {
    "values": ({"kernel": "    return torch.relu(x) * n + 1"}, "beyond rtol"),
    "shape": ({"kernel": "    return torch.relu(x)[1:] * n"}, "has shape (7, 5), and the reference's (8, 5)"),
    "nan": ({"kernel": "    return torch.relu(x) * float('nan')"}, "is NaN in 40 of 40 elements, first at (0, 0)"),
    "reference nan": ({"reference": "    return x * float('nan')"}, "of reference_fn is NaN"),
    "infinite": ({"kernel": "    return torch.relu(x) * n / 0"}, "NaN"),
    "more results": ({"kernel": "    return torch.relu(x), x"}, "returned 2 tensors and reference_fn 1"),
    "no tensor": ({"kernel": "    return None"}, "kernel_fn returned no tensor"),
    "changes": ({"kernel": "    x.add_(1)\n    return torch.relu(x) * n"}, "kernel_fn changes its inputs: argument 0"),
    "reference changes": ({"reference": "    return x.clamp_(min=0) * n"}, "reference_fn changes its inputs"),
    "raises": ({"kernel": "    raise ValueError('no tile fits')"}, "kernel_fn failed: ValueError: no tile fits"),
    "kind": ({"kernel": "    return (torch.relu(x) * n).int()"}, "is torch.int32"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_file_is_told_in_one_sentence(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    swaps, words = WRONG[name]
    assert _verify(_file(tmp_path, GOOD, **swaps)) == 1
    printed = capsys.readouterr().out
    assert words in printed and printed.count("\n") == 1 and "WRONG" in printed


def test_fresh_values_find_a_kernel_that_remembers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    remembers = "    global seen\n    if 'seen' not in globals():\n        seen = torch.relu(x) * n\n    return seen"
    assert _verify(_file(tmp_path, GOOD, kernel=remembers)) == 1
    assert "beyond rtol" in capsys.readouterr().out


USELESS = {
    "names": ("def kernel_fn(x):\n    return x\n", "does not export reference_fn and get_inputs"),
    "syntax": ("def kernel_fn(x:\n", "cannot be imported: SyntaxError"),
    "import": ("import not_a_module_at_all\n", "cannot be imported: ModuleNotFoundError"),
    "not callable": (GOOD.replace("def get_inputs():\n    return", "get_inputs ="), "does not export get_inputs"),
    "inputs": (GOOD.replace("[torch.randn(8, 5), 3]", "5"), "return a list with at least one tensor"),
    "inputs raise": (GOOD.replace("[torch.randn(8, 5), 3]", "[1 / 0]"), "get_inputs of my_kernel.py failed"),
    "reference": (GOOD.replace("x.clamp(min=0) * n", "x.clam()"), "reference_fn of my_kernel.py failed"),
}


@pytest.mark.parametrize("name", USELESS)
def test_a_file_that_cannot_be_judged_exits_with_2(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text, words = USELESS[name]
    assert _verify(_file(tmp_path, text)) == 2
    printed = capsys.readouterr()
    assert words in printed.err and printed.err.count("\n") == 1 and not printed.out


def test_tolerances(tmp_path: Path) -> None:
    off = _file(tmp_path, GOOD, kernel="    return torch.relu(x) * n * 1.001")
    assert _verify(off) == 1
    assert _verify(off, "--rtol", "1e-2") == 0
    assert _verify(off, "--atol", "1.0") == 0


def test_infinities_must_be_in_the_same_places(tmp_path: Path) -> None:
    both = _file(
        tmp_path, GOOD, kernel="    return (x - x) + float('inf')", reference="    return (x - x) + float('inf')"
    )
    assert _verify(both) == 0
    one = _file(
        tmp_path, GOOD, kernel="    return (x - x) + float('inf')", reference="    return (x - x) - float('inf')"
    )
    assert _verify(one) == 1


def test_neighbours_can_be_imported(tmp_path: Path) -> None:
    (tmp_path / "beside.py").write_text("import torch\nrelu = torch.relu\n")
    assert _verify(_file(tmp_path, "from beside import relu\n" + GOOD.replace("torch.relu", "relu"))) == 0


def test_a_file_makes_its_own_inputs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert _verify(_file(tmp_path, GOOD), "--b", "4") == 2
    assert "--b belong to a design" in capsys.readouterr().err


def test_benchmark_times_what_is_right(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert contract.main_benchmark([str(_file(tmp_path, GOOD)), "--seconds", "0.02"]) == 0
    out = capsys.readouterr().out
    assert "kernel_fn" in out and "reference_fn" in out and "wall clock on the CPU" in out


class Replays:
    """A timer whose replays take 30 us each. captures: whether a graph takes the calls."""

    def __init__(self, captures: bool) -> None:
        self.captures, self.counts = captures, list[int]()

    def synchronize(self) -> None: ...

    def capture(self, calls: Any, rotations: int, *, graph: bool = True) -> Any:
        if graph and not self.captures:
            raise RuntimeError("no graph")
        return calls

    def start(self, replay: Any, count: int) -> Any:
        self.counts.append(len(replay))
        return SimpleNamespace(wait=lambda: [30.0] * count)


@pytest.mark.parametrize("captures", [True, False])
def test_a_gpu_is_timed_by_the_timer_of_measure(captures: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A replay calls the function once for each input set, so a call takes its share of the replay."""
    timer, seen = Replays(captures), list[int]()
    monkeypatch.setattr(contract, "make_backend", lambda name, on_gpu: timer)
    monkeypatch.setattr(contract, "_on_gpu", lambda inputs: True)
    timing = contract._time(seen.append, [(1,), (2,), (3,)], 0.0)
    assert seen == [1, 2, 3] and timer.counts == [3]
    assert (timing.median, timing.p10, timing.p90, timing.n) == (10.0, 10.0, 10.0, 5)
    assert ("CUDA-graph replays over 3" in timing.method) == captures == ("events around" not in timing.method)


@pytest.mark.gpu
def test_a_file_is_timed_on_a_gpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = _file(tmp_path, GOOD.replace("torch.randn(8, 5)", "torch.randn(4096, 4096, device='cuda')"))
    assert contract.main_benchmark([str(path), "--seconds", "0.1"]) == 0
    assert capsys.readouterr().out.count("CUDA-graph replays over 4 input sets") == 2


def test_benchmark_gives_no_time_to_what_is_wrong(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    wrong = _file(tmp_path, GOOD, kernel="    return torch.relu(x) * n + 1")
    assert contract.main_benchmark([str(wrong), "--seconds", "0.02"]) == 1
    out = capsys.readouterr().out
    assert "WRONG, so it has no time" in out and " us " not in out


def test_a_design_keeps_the_contract(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["torch/flash_mla", "--device", "cpu", "--b", "2", "--t", "130", "--h", "4", "--k", "32", "--p", "16"]
    assert contract.main_verify([*asked, "--rtol", "2e-2", "--atol", "1e-3"]) == 0
    assert "right on 2 input sets" in capsys.readouterr().out
    assert contract.main_verify([*asked, "--rtol", "1e-9", "--atol", "0"]) == 1
    assert contract.main_verify([*asked, "--page", "16"]) == 0
    assert "right in" in capsys.readouterr().out, "without tolerances the house's own check"
    assert contract.main_benchmark([*asked, "--seconds", "0.01"]) == 0


def test_a_design_is_judged_by_the_check_before_it_is_timed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Unless tolerances are given, which are those of the results alone."""
    wrong = CheckReport(False, "own (seed 0): out is 2 off", {})
    monkeypatch.setattr("mla_var3.check.judge.check", lambda *args, **options: wrong)
    asked = ["torch/flash_mla", "--device", "cpu", "--b", "2", "--t", "130", "--h", "4", "--seconds", "0.01"]
    assert contract.main_benchmark(asked) == 1
    assert "WRONG, so it has no time: own (seed 0): out is 2 off." in capsys.readouterr().out
    assert contract.main_benchmark([*asked, "--rtol", "2e-2", "--atol", "1e-3"]) == 0


@pytest.mark.parametrize(
    ("target", "words"),
    [
        ("torch/flash_mal", "did you mean 'torch/flash_mla'"),
        ("nowhere.py", "there is no file nowhere.py"),
        ("peer/flash_mla_lib", "which is not here"),
    ],
)
def test_unknown_targets(target: str, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert contract.main_verify([target, "--device", "cpu"]) == 2
    assert words in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "given", "expected"),
    [
        ("decode", {}, {"b": 2, "t": 300, "h": 16}),
        ("prefill", {"t": 70}, {"b": 1, "s": 70, "h": 4}),
        ("prefill", {"s": 70}, {"b": 1, "s": 70, "h": 4}),
        ("mixed", {}, {"b": 2, "t": 300, "h": 16, "n": 64}),
        ("mixed", {"t": 40}, {"b": 2, "t": 300, "h": 16, "n": 40}),
    ],
)
def test_a_design_gets_a_problem_of_its_workload(name: str, given: dict[str, int], expected: dict[str, int]) -> None:
    assert workload.get(name).sample(True, given) == expected


@pytest.mark.parametrize("label", ["triton/flash_mla", "cutile-dsl/flash_attention", "cutile-dsl/mla_var6_plus"])
def test_designs_are_verified_in_an_interpreter(label: str, repo_root: Path) -> None:
    """In a process of its own: an interpreter is chosen for a process."""
    language = registry.KernelId.parse(label)
    if reason := registry.missing(language):
        pytest.skip(reason)
    script = repo_root / "scripts" / "verify_kernel.py"
    command = [sys.executable, str(script), label, "--t", "70", "--device", "cpu"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{label}: right in" in done.stdout


def test_a_language_without_an_interpreter_is_refused_in_a_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    assert contract.main_verify(["cute-dsl/flash_mla", "--device", "cpu"]) == 2
    assert "CuTe DSL has no interpreter: its kernels are compiled only; use a machine" in capsys.readouterr().err


@pytest.mark.parametrize("script", ["verify_kernel.py", "benchmark_kernel.py"])
def test_the_scripts_run_from_anywhere(script: str, repo_root: Path, tmp_path: Path) -> None:
    path = _file(tmp_path, GOOD.replace("import torch", "import nothing_of_that_name"))
    command = [sys.executable, str(repo_root / "scripts" / script), str(path)]
    done = subprocess.run(command, cwd=tmp_path, text=True, capture_output=True, timeout=120, check=False)
    assert done.returncode == 2 and done.stderr.startswith("error: ") and "Traceback" not in done.stderr


def test_load_names_what_is_missing(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"does not export kernel_fn, reference_fn and get_inputs"):
        contract.load(_file(tmp_path, "x = 1\n"))


def test_a_mistake_is_told_with_its_line_and_on_request_with_its_traceback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = _file(tmp_path, GOOD, kernel="    return torch.relu(x) * m")
    monkeypatch.delenv("MLA_VAR3_TRACEBACK", raising=False)
    assert _verify(path) == 1
    said = capsys.readouterr()
    assert "NameError: name 'm' is not defined (my_kernel.py:5: return torch.relu(x) * m)" in said.out
    assert said.err == ""
    monkeypatch.setenv("MLA_VAR3_TRACEBACK", "1")
    assert _verify(path) == 1
    assert "Traceback (most recent call last)" in capsys.readouterr().err
