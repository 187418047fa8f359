"""What the registry reads off files without running them: peers, and the parts of pipelines."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from mla_var3 import cli, paths
from mla_var3.catalogue import registry
from mla_var3.catalogue.registry import KernelId
from mla_var3.errors import UserError
from mla_var3.kernel.layer import LayerTiling
from mla_var3.kernel.parts import PartsTiling
from mla_var3.toolchain import source, versions
from mla_var3.workload.layer import LayerProblem

PIPELINES = (
    "cute-dsl/chunk_absorb",
    "cute-dsl/chunk_decompress",
    "cute-dsl/indexer_topk",
    "cute-dsl/mla_layer",
    "peer/flash_mla_layer",
)


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of somebody's own kernels, beside the package's."""
    monkeypatch.setattr(paths, "kernel_dirs", lambda: [paths.package() / "kernel", tmp_path])
    for read in (registry.all_kernels, registry._peers):
        read.cache_clear()
        monkeypatch.setattr(registry, read.__name__, read.__wrapped__)
    (tmp_path / "peer").mkdir()
    return tmp_path


def test_listing_imports_no_library_and_no_plan() -> None:
    program = (
        "import json, sys\nfrom mla_var3.catalogue import registry\n"
        "hashes = [registry.source_hash(k) for k in registry.all_kernels()]\n"
        "print(json.dumps([len(hashes), sorted(sys.modules)]))"
    )
    env = {"PATH": "", "PYTHONPATH": str(paths.import_root())}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=env, check=True)
    count, modules = json.loads(done.stdout)
    assert count == len(registry.all_kernels())
    assert not {"torch", "triton", "cutlass", "cuda", "flash_mla", "flashinfer"} & set(modules)
    assert not [name for name in modules if name.startswith("mla_var3.kernel.")]


# ---------------------------------------------------------------- peers
def test_peers_share_files_and_each_has_its_own_plan() -> None:
    peers = [k for k in registry.all_kernels() if k.language == "peer"]
    files = {k.path for k in peers}
    assert files == set((paths.package() / "kernel" / "peer").glob("*.py")) - {
        paths.package() / "kernel/peer/__init__.py"
    }
    assert len(files) < len(peers) / 2
    for kernel in peers:
        plan_type = registry.get_plan(kernel)
        assert plan_type.__dict__["peer"] == kernel.design and plan_type.__module__ == kernel.module
    assert len({registry.get_plan(k) for k in peers}) == len(peers)


def test_each_peer_is_listed_with_what_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["list", "kernels"]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("peer/")]
    said = {line.split()[0]: re.split(r"  +", line)[-1] for line in lines}
    assert len(said) == len(set(said.values())) == len([k for k in registry.all_kernels() if k.language == "peer"])
    assert said["peer/fa4"].startswith("FlashAttention-4") and said["peer/quack_rmsnorm"].startswith("quack's rmsnorm")
    assert all(text.endswith(".") for text in said.values())


def test_a_file_of_ones_own_holds_peers_of_the_layer_that_it_is_named_after(own: Path) -> None:
    (own / "peer" / "norm_mine.py").write_text(
        "from mla_var3.kernel.library import is_here\nfrom mla_var3.kernel.peer.norm import PeerNormPlan\n"
        "from mla_var3.device import Requirement\n\n"
        + "".join(
            f'class {name.title()}(PeerNormPlan):\n    peer = "{name}"\n'
            f'    requires = Requirement(archs=(), problem=is_here("{name}"))\n    def attach(self, *_): ...\n\n'
            for name in ("first", "second")
        )
    )
    kernels = {k.label: k for k in registry.all_kernels()}
    for name in ("first", "second"):
        kernel = kernels[f"peer/{name}"]
        assert (kernel.layer, kernel.path) == ("norm", own / "peer" / "norm_mine.py")
        assert registry.get_plan(kernel).__name__ == name.title()


def test_a_peer_with_a_mistake_in_its_file_is_listed_and_two_of_a_name_are_refused(own: Path) -> None:
    (own / "peer" / "norm_torn.py").write_text('class A(B):\n    peer = "torn"\n\n  def\n')
    (own / "peer" / "norm_twice.py").write_text(
        "from mla_var3.kernel.peer.norm import PeerNormPlan\n\n"
        + "".join(f'class {name}(PeerNormPlan):\n    peer = "twice"\n' for name in "AB")
    )
    kernels = {k.label: k for k in registry.all_kernels()}
    assert len(registry.source_hash(kernels["peer/torn"])) == 16
    with pytest.raises(SyntaxError):
        registry.get_plan(kernels["peer/torn"])
    with pytest.raises(UserError, match=r"norm_twice.py must define exactly one .* with peer = 'twice'; it defines 2"):
        registry.get_plan(kernels["peer/twice"])


# ---------------------------------------------------------------- parts of pipelines
def test_pipelines_declare_what_they_are_made_of() -> None:
    declared = {k.label: [part.label for part in registry.parts(k)] for k in registry.all_kernels()}
    assert {label for label, parts in declared.items() if parts} == set(PIPELINES)
    for label in PIPELINES:
        kernel = KernelId.parse(label)
        if registry.missing(kernel.language) is None:
            assert sorted(registry.get_plan(kernel).parts) == declared[label]


@pytest.mark.parametrize(("version", "refused"), [("4.5.2", True), ("4.8.0", False), ("4.8.1", False), ("4.10", False)])
def test_a_compiler_that_is_too_old_counts_as_missing(
    version: str, refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registry, "importable", lambda package: True)
    monkeypatch.setattr(versions, "installed", lambda names: dict.fromkeys(names, version))
    versions.too_old.cache_clear()
    try:
        reason = registry.missing("cute-dsl")
        assert registry.missing("triton") is None
    finally:
        versions.too_old.cache_clear()
    assert (reason is not None) == refused
    if reason is not None:
        assert reason.startswith(
            "cute-dsl needs nvidia-cutlass-dsl 4.8.0 or later, and 4.5.2 is installed: pip install "
        )
        assert reason.endswith(", or uninstall it and give a bundle.")


def test_the_oldest_compiler_is_the_one_that_the_package_asks_for(repo_root: Path) -> None:
    package, least = versions.OLDEST["cute-dsl"]
    assert f'"{package}[cu13]>={least},' in (repo_root / "pyproject.toml").read_text(encoding="utf-8")


@pytest.mark.parametrize("label", PIPELINES)
def test_no_tiling_of_a_pipeline_has_a_part_that_is_not_declared(label: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = KernelId.parse(label)
    if (reason := registry.missing(kernel.language)) is not None:
        pytest.skip(reason)
    plan_type = registry.get_plan(kernel)
    heads = "heads" if kernel.layer == "indexer" else "h"
    for h in (16, 128):
        plan = plan_type(plan_type.workload.problem(**{heads: h}))
        for tiling in (plan.default_tiling(), *plan.autotune_configs()):
            assert isinstance(tiling, PartsTiling)
            assert {part[0] for part in tiling.parts(plan.problem).values()} <= set(plan_type.parts)


def test_a_part_that_is_not_declared_is_refused() -> None:
    kernel = KernelId.parse("cute-dsl/mla_layer")
    if (reason := registry.missing(kernel.language)) is not None:
        pytest.skip(reason)
    plan_type = registry.get_plan(kernel)
    plan = plan_type(LayerProblem(), LayerTiling(attention="torch/flash_mla"))
    plan.require = lambda: None  # type: ignore[method-assign]
    with pytest.raises(UserError, match="torch/flash_mla is no part of MlaLayerPlan: add it to `parts` there"):
        plan.plan_empty()


def test_declarations_are_literals_and_strings_elsewhere_are_none(tmp_path: Path) -> None:
    file = tmp_path / "plan.py"
    file.write_text(
        'OTHER = "triton/rmsnorm"\n\nclass A:\n    parts = ("triton/rope_append",)\n    more = "torch/rmsnorm"\n'
    )
    assert source.declarations(file) == [{"parts": ("triton/rope_append",)}]
    file.write_text('class A:\n    parts: tuple[str, ...] = tuple(f"triton/{x}" for x in "ab")\n')
    with pytest.raises(UserError, match=r"plan.py computes parts of a plan: write a literal"):
        source.declarations(file)
    assert source.declarations(tmp_path / "nothing.py") == []
