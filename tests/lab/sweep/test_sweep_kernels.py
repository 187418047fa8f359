"""Which versions a sweep's patterns name, and in which tilings they run."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest

from mla_var3 import workload
from mla_var3.catalogue import registry
from mla_var3.device import Device
from mla_var3.dispatch import rules
from mla_var3.errors import UserError
from mla_var3.files import read_yaml
from mla_var3.lab.sweep import config as sweep_config
from mla_var3.lab.sweep import cpu
from mla_var3.lab.sweep import run as sweep
from mla_var3.lab.sweep.plan import chosen_kernels, expand, expand_cells, find_targets, kernels_of
from mla_var3.measure import cell
from mla_var3.record import Record
from mla_var3.toolchain import source

H200 = Device.get("h200")


def test_wildcards_name_what_computes_what_the_experiment_asks_for() -> None:
    def labels(*words: str) -> set[str]:
        return {k.label for k in chosen_kernels(sweep_config.compose(list(words)))}

    decode = labels("experiment=decode")
    assert "torch/flash_mla" in decode and not {"peer/fa4", "peer/cudnn_sdpa"} & decode
    assert not any("flash_attention" in label or "mla_var6_plus" in label for label in decode)
    assert labels("experiment=prefill") >= {"peer/fa4", "peer/cudnn_sdpa"}
    assert "peer/fa4" in labels("experiment=decode", "kernels=peer/fa4,torch/flash_mla")


def test_no_two_choices_of_kernels_are_the_same(repo_root: Path) -> None:
    said = {path.stem: read_yaml(path) for path in sorted((repo_root / "conf" / "kernels").glob("*.yaml"))}
    assert [(a, b) for a, b in combinations(said, 2) if said[a] == said[b]] == []


def test_comments_of_configs_name_devices_that_are_known(repo_root: Path) -> None:
    for path in (repo_root / "conf").rglob("*.yaml"):
        for key in re.findall(r"\bdevice=([a-z]\w*(?:-\w+)?)", path.read_text(encoding="utf-8")):
            assert key == "auto" or Device.get(key), path


def test_an_experiment_of_several_workloads_has_each_cell_with_versions_of_its_own() -> None:
    config = sweep_config.compose(["experiment=nightly"])
    cells = expand_cells(config)
    assert len(cells) == 40
    assert {cell.workload for cell in cells} == set(rules.served()) - {"index_append", "indexed_append"}
    # Chunks behind a prefix have an experiment of their own.
    assert set(workload.names()) - set(rules.served()) == {"chunked_prefill"}
    kernels = chosen_kernels(config)
    assert {"peer/flash_mla_lib", "peer/fa4", "peer/torch_compile_rmsnorm", "peer/torch_compile_merge_partials"} <= {
        k.label for k in kernels
    }
    of_cell = {cell: [k.label for k in kernels_of(config, kernels, cell)] for cell in cells}
    assert of_cell[cells[0]] == ["peer/flash_mla_lib", "peer/fa3_qv"]
    (norm, *_) = (cell for cell in cells if cell.workload == "norm")
    assert set(of_cell[norm]) == {f"peer/{name}_rmsnorm" for name in ("flashinfer", "quack", "torch_compile")}
    # With a wildcard, versions of every workload that a cell or a grid names, each where it computes what is asked for.
    words = ["experiment=mla_var6_plus", "kernels=*/mla_var6_plus*,torch/*,cutile-dsl/flash_attention*"]
    mixed = sweep_config.compose(words)
    labels = {k.label for k in chosen_kernels(mixed)}
    assert {"cutile-dsl/mla_var6_plus", "torch/flash_mla"} <= labels
    assert not {"torch/rmsnorm", "cutile-dsl/flash_attention"} & labels
    both = expand_cells(mixed)
    first, last = both[0], both[-1]
    assert (first.workload, last.workload) == ("decode", "mixed")
    assert [k.label for k in kernels_of(mixed, chosen_kernels(mixed), first)] == ["torch/flash_mla"]
    assert [k.label for k in kernels_of(mixed, chosen_kernels(mixed), last)] == ["cutile-dsl/mla_var6_plus"]


def asked(*words: str) -> list[tuple[str, dict[str, Any]]]:
    config = sweep_config.compose(["experiment=ladder", "problem.b=1", *words])
    return [(point.kernel.label, point.asked) for point in expand(config, find_targets(config, [])[0])]


def test_every_version_runs_in_each_of_the_tilings_that_it_tells_apart() -> None:
    pytest.importorskip("cutlass", reason="nvidia-cutlass-dsl is not installed")
    words = ("kernels=cute-dsl/flash_mla_v23,cute-dsl/flash_mla_v24", "tiling.workers=2")
    versions = "kernels=cute-dsl/flash_mla,cute-dsl/flash_mla_v23"
    assert asked(*words, "tilings=[{split_tokens: 512},{workers: 4},{}]") == [
        (f"cute-dsl/flash_mla_{version}", tiling)
        for version in ("v23", "v24")
        for tiling in ({"workers": 2, "split_tokens": 512}, {"workers": 4}, {"workers": 2})
    ]
    assert asked(*words) == [(f"cute-dsl/flash_mla_{v}", {"workers": 2}) for v in ("v23", "v24")]
    # A version that lacks a knob runs without it, once.
    assert asked(versions, "tilings=[{workers: 3},{num_splits: 4}]") == [
        ("cute-dsl/flash_mla", {}),
        ("cute-dsl/flash_mla", {"num_splits": 4}),
        ("cute-dsl/flash_mla_v23", {"workers": 3}),
        ("cute-dsl/flash_mla_v23", {}),
    ]
    # An older version that lacks the knob is no other tiling's newest.
    newest = [("cute-dsl/flash_mla_v23", {"workers": 3})]
    both = asked(versions, "kernels.newest=true", "tilings=[{workers: 3},{}]")
    assert both == [*newest, ("cute-dsl/flash_mla_v23", {})]
    assert asked(versions, "kernels.newest=true", "tiling.workers=3") == newest
    assert asked(versions, "kernels.newest=true", "tilings=[{workers: 3}]") == newest


@pytest.mark.parametrize(
    ("word", "sentence"),
    [
        ("tilings=[num_splits]", r"tilings\[0\] = 'num_splits' is not a mapping of knobs: write 'tilings="),
        ("tilings=[{num_split: 1}]", r"no chosen kernel has a knob tiling\.num_split: did you mean 'num_splits'"),
        ("tilings={num_splits: 1}", "tilings"),
    ],
)
def test_mistakes_in_tilings(word: str, sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        asked("kernels=torch/flash_mla,triton/flash_mla", word)


def test_tilings_are_contenders_of_one_cell(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """In one call of the worker, hence in turn, and each with a key of its own, so that resuming tells them apart."""
    pytest.importorskip("cutlass", reason="nvidia-cutlass-dsl is not installed")
    seen: list[list[tuple[str, str]]] = []

    def measure_cells(cells: Any, device: Device, settings: Any, *, experiment: str) -> Iterator[Record]:
        for problem, contenders in cells:
            keys = [cell.contender_key(problem, contender, device) for contender in contenders]
            assert len(set(keys)) == len(keys)
            seen.append([(contender.kernel.label, str(contender.requested)) for contender in contenders])
        return iter(())

    monkeypatch.setattr(cell, "measure_cells", measure_cells)
    monkeypatch.setattr(registry, "missing", lambda kernel: None)
    monkeypatch.setattr(Device, "detect", staticmethod(lambda index=0: H200))
    monkeypatch.chdir(tmp_path)
    words = ["experiment=ladder", "problem.b=1", "kernels=cute-dsl/flash_mla", "tilings=[{num_splits: 8},{}]"]
    assert sweep.main(words) == 0
    assert seen == [[("cute-dsl/flash_mla", "{'num_splits': 8}"), ("cute-dsl/flash_mla", "default")]]
    with pytest.raises(UserError, match="give one of them"):
        sweep.main([*words, "bench.tune=true"])


def test_a_cpu_checks_versions_of_every_workload_in_cases_that_it_has() -> None:
    pytest.importorskip("torch", reason="torch is not installed")
    for design in ("flash_mla", "rmsnorm", "absorb_gemm"):
        kernel = registry.KernelId.parse(f"torch/{design}")
        workload = registry.get_plan(kernel).workload
        problem = workload.problem.from_record(workload.sample(True, {}))
        outcome = cpu.run_one(kernel, workload.small(problem), {})
        assert (outcome["status"], outcome["reason"]) == ("passed", "")


def test_a_version_that_does_not_parse_has_a_hash_and_stops_no_other(tmp_path: Path) -> None:
    broken = tmp_path / "broken.py"
    broken.write_text("def wrong(:\n")
    first = source.source_hash(broken)
    broken.write_text("def right(): pass\n")
    assert len(first) == 16 and source.source_hash(broken) != first
