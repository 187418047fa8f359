"""Without an option about the problem every verb takes one that the named version takes; of several versions, each has
a problem of what it computes, and one that stops does not stop the others."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import pytest

from mla_var3 import cli, workload
from mla_var3.catalogue import jobs, registry
from mla_var3.catalogue.registry import KernelId
from mla_var3.cli import arguments
from mla_var3.cli.check import EXIT_NOT_CHECKED
from mla_var3.device import Device
from mla_var3.errors import UserError

HERE = [k for k in registry.all_kernels() if not registry.missing(k)]
needs_cute = pytest.mark.skipif(bool(registry.missing("cute-dsl")), reason="no CuTe DSL here")
needs_triton = pytest.mark.skipif(bool(registry.missing("triton")), reason="no triton here")


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(Device, "detect", staticmethod(lambda index=0: None))
    monkeypatch.chdir(tmp_path)


def parsed(*words: str) -> argparse.Namespace:
    parser = arguments.Parser()
    arguments.add_problem(parser)
    return parser.parse_args(list(words))


# ---------------------------------------------------------------- one version
@pytest.mark.parametrize("kernel", HERE, ids=lambda k: k.label)
@pytest.mark.parametrize("sizes", ["defaults", "for a GPU", "for a CPU"])
def test_every_version_takes_its_default_problem(kernel: KernelId, sizes: str) -> None:
    plan_type = registry.get_plan(kernel)
    fields = {} if sizes == "defaults" else plan_type.workload.sample(sizes == "for a CPU", {})
    problem = arguments.problem_for(parsed(), [kernel], **fields)
    plan_type(problem, None, Device.get("h200")).require()
    usual = plan_type.workload.problem(**fields)
    if plan_type.requires.accepts(usual):
        assert problem == usual, "the workload's own comes first"


@pytest.mark.parametrize("name", workload.names())
def test_every_variant_is_a_problem_that_differs_from_the_default(name: str) -> None:
    kind = workload.get(name)
    for fields in kind.variants:
        assert kind.problem.from_record(fields) != kind.problem()


@needs_cute
def test_what_the_user_says_is_never_replaced() -> None:
    few = KernelId.parse("cute-dsl/flash_mla_v24")
    assert arguments.problem_for(parsed(), [few]).h == 16
    assert arguments.problem_for(parsed("--b", "128"), [few]).to_record() == {
        **workload.get("decode").problem(b=128, h=16).to_record()
    }
    for words in (["--h", "128"], ["--model", "deepseek-v3"], ["--problem", "h=128"]):
        assert arguments.problem_for(parsed(*words), [few]).h == 128
        assert cli.main(["check", few.label, *words]) == 2


@needs_cute
def test_several_versions_share_a_problem_that_all_take() -> None:
    pair = [KernelId.parse(f"cute-dsl/flash_mla_v{number}") for number in (23, 24)]
    assert arguments.problem_for(parsed(), pair[:1]).h == 128
    assert arguments.problem_for(parsed(), pair).h == 16


def test_a_model_counts_before_the_sizes_of_a_check() -> None:
    gemm = workload.get("gemm")
    small = gemm.sample(True, {})
    assert arguments.problem_of(parsed(), gemm, **small).h == small["h"]
    assert arguments.problem_of(parsed("--model", "kimi-k2"), gemm, **small).h == 64


# ---------------------------------------------------------------- verbs
def recorded(monkeypatch: pytest.MonkeyPatch, chosen: list[KernelId], verb: str) -> dict[str, str]:
    """Labels of the problems that a verb would compile, profile or time, by kernel."""
    found: dict[str, str] = {}

    def compile_all(todo: Any, **_: Any) -> Any:
        for job in todo:
            kernel = KernelId(job.language, job.layer, job.design, job.version)
            found[kernel.label] = workload.problem_from_record(job.problem).label
        raise UserError("enough")

    class Sweep:
        def __init__(self, config: Any, launcher: Any) -> None:
            problem = workload.get(config.experiment.workload).problem.from_record(config.experiment.cells[0])
            for label in config.kernels.patterns:
                found[label] = problem.label

        def run(self) -> None: ...

    def show(request: Any, detected: Any) -> None:
        found[request.kernel.label] = request.problem.label
        if request.baseline is not None:
            assert registry.get_plan(request.baseline).requires.accepts(request.problem)

    monkeypatch.setattr(jobs, "compile_all", compile_all)
    monkeypatch.setattr("mla_var3.lab.sweep.run.Sweep", Sweep)
    monkeypatch.setattr("mla_var3.cli.profile.show", show)
    if verb == "bench":
        monkeypatch.setattr(Device, "detect", staticmethod(lambda index=0: Device.get("h200")))
    assert cli.main([verb, *(kernel.label for kernel in chosen)]) in (0, 2)
    return found


@pytest.mark.parametrize("verb", ["compile", "profile", "bench"])
def test_each_verb_gives_each_version_a_problem_that_it_takes(verb: str, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = [k for k in HERE if registry.is_compiled(k.language)]
    labels = recorded(monkeypatch, compiled, verb)
    assert set(labels) == {k.label for k in compiled}
    for kernel in compiled:
        plan_type = registry.get_plan(kernel)
        own = arguments.problem_for(parsed(), [kernel]).label
        if verb == "bench":  # one problem of each workload, so that times can be compared
            own = arguments.problem_for(
                parsed(), [k for k in compiled if registry.get_plan(k).workload is plan_type.workload]
            ).label
        if verb == "profile" and labels[kernel.label] != own:
            continue  # a problem that the version before takes too: `show` above holds it to that
        assert labels[kernel.label] == own


@needs_triton
def test_diff_of_different_workloads_names_both(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["diff", "triton/rmsnorm", "triton/flash_mla"]) == 2
    assert "triton/rmsnorm computes norm and triton/flash_mla computes decode" in capsys.readouterr().err


def test_the_file_contract_takes_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    if registry.missing("cutile-dsl"):
        pytest.skip("no cuTile here")
    from mla_var3.lab import contract

    assert contract.of_design("cutile-dsl/flash_mla_v2", fields={"b": 1, "t": 70}, device="cpu").name


# ---------------------------------------------------------------- check goes on
def checked(monkeypatch: pytest.MonkeyPatch, wrong: str = "", raising: dict[str, Exception] | None = None) -> list[str]:
    """Replaces the judge; the labels of kernels and problems that it is given, as they come."""
    from mla_var3.check import judge

    seen: list[str] = []

    def check(plan_type: Any, problem: Any, *_: Any, **__: Any) -> Any:
        peer = getattr(plan_type, "peer", None)  # several share a module
        label = next(
            k.label for k in registry.all_kernels() if k.module == plan_type.__module__ and peer in (None, k.design)
        )
        seen.append(f"{label} {problem.label}")
        if raising and label in raising:
            raise raising[label]
        return judge.CheckReport(label != wrong, "", {"out": 1e-3})

    monkeypatch.setattr(judge, "check", check)
    return seen


BOTH = ("torch/flash_mla", "torch/rmsnorm")


def test_designs_of_different_workloads_get_each_their_own(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seen = checked(monkeypatch)
    assert cli.main(["check", "torch/*"]) == 0
    torch_ = [k for k in registry.all_kernels() if k.language == "torch"]
    assert [line.split()[0] for line in seen] == [k.label for k in torch_]
    assert {"torch/flash_mla b2_s1_h128_t300", "torch/rmsnorm r3_w7168", "torch/sparse_mla v32_b2_s1_h16_top40"} <= set(
        seen
    )
    out = capsys.readouterr().out
    assert out.count("checking on the CPU at small sizes") == 1
    assert all(f"{line}: passed" in out for line in seen), "each verdict names its kernel and problem"


@pytest.mark.parametrize("order", [BOTH, BOTH[::-1]])
def test_what_one_does_not_take_is_told_and_the_others_go_on(
    order: tuple[str, str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seen = checked(monkeypatch)
    assert cli.main(["check", *order, "--b", "2", "--t", "70"]) == EXIT_NOT_CHECKED == 3
    assert seen == ["torch/flash_mla b2_s1_h128_t70"]
    assert "torch/rmsnorm: not checked: problem has no field 'b'" in capsys.readouterr().err


def test_nothing_that_can_be_checked_is_a_mistake_that_names_each(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["check", "torch/rmsnorm", "torch/absorb_gemm", "--t", "70"]) == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("mla-var3: torch/rmsnorm: problem has no field 't'") and "; torch/absorb_gemm: " in last
    assert cli.main(["check", "torch/rmsnorm", "--t", "70"]) == 2
    assert capsys.readouterr().err.startswith("mla-var3: torch/rmsnorm: problem has no field 't'")


def test_one_that_is_wrong_or_breaks_off_does_not_stop_the_others(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from mla_var3.cutile_cpu.errors import KernelFault
    from mla_var3.toolchain import mistakes

    seen = checked(monkeypatch, wrong=BOTH[0])
    assert cli.main(["check", *BOTH]) == 1 and len(seen) == 2
    place = mistakes.Place(str(KernelId.parse(BOTH[0]).path), 1)
    mistake = mistakes.KernelMistake("NameError", "name 'x' is not defined", place, None, NameError("x"))
    fault = UserError("a load left the array")
    fault.__cause__ = KernelFault("a load left the array")
    for error, words in ((mistake, "NameError: name 'x' is not defined"), (fault, "a load left the array")):
        seen = checked(monkeypatch, raising={BOTH[0]: error})
        capsys.readouterr()
        assert cli.main(["check", *BOTH]) == 2 and len(seen) == 2
        said = capsys.readouterr()
        assert f"{BOTH[0]}: {words}" in said.err and "torch/rmsnorm r3_w7168: passed" in said.out
    checked(monkeypatch, raising={BOTH[0]: RuntimeError("of the laboratory itself")})
    monkeypatch.setattr(mistakes, "_is_kernel_code", lambda file: False)
    with pytest.raises(RuntimeError, match="of the laboratory itself"):
        cli.main(["check", *BOTH])


# ---------------------------------------------------------------- compiled is not checked
@needs_cute
def test_without_a_gpu_a_cute_version_is_compiled_and_not_passed(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["check", "cute-dsl/rmsnorm"]) == EXIT_NOT_CHECKED
    out = capsys.readouterr().out
    assert out.startswith("cute-dsl/rmsnorm r4096_w7168: compiled for h200, not checked: CuTe DSL has no interpreter")
    assert "passed" not in out


@needs_cute
def test_a_pass_beside_it_does_not_hide_it(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    seen = checked(monkeypatch)
    assert cli.main(["check", "cute-dsl/rmsnorm", "torch/rmsnorm"]) == EXIT_NOT_CHECKED
    assert seen == ["torch/rmsnorm r3_w7168"]
    assert "compiled for h200, not checked" in capsys.readouterr().out


@needs_cute
def test_one_that_does_not_compile_is_a_mistake(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from mla_var3.toolchain import mistakes

    plan_type = registry.get_plan(kernel := KernelId.parse("cute-dsl/rmsnorm"))
    place = mistakes.Place(str(kernel.path), 1)

    def broken(self: Any) -> Any:
        raise mistakes.KernelMistake("NameError", "name 'x' is not defined", place, None, NameError("x"))

    monkeypatch.setattr(plan_type, "plan_empty", broken)
    assert cli.main(["check", "cute-dsl/rmsnorm"]) == 2
    assert "NameError: name 'x' is not defined" in capsys.readouterr().err
    checked(monkeypatch)
    assert cli.main(["check", "cute-dsl/rmsnorm", "torch/rmsnorm"]) == 2
    assert "cute-dsl/rmsnorm: NameError" in capsys.readouterr().err


def test_help_says_what_the_exit_codes_mean(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["check", "--help"])
    out = " ".join(capsys.readouterr().out.split())
    assert "with 3 when none is wrong but one was not checked" in out
