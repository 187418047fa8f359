"""The digest of what ran: equal for the same code under other names, different for each thing that it covers."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import mla_var3
from mla_var3.toolchain.compiled import CompiledKernel, Resources
from mla_var3.toolchain.digest import Code, KernelCode, hash_of, plain_name

HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def kernels() -> Any:
    pytest.importorskip("cutlass", reason="nvidia-cutlass-dsl is not installed")
    sys.path.insert(0, str(HERE))
    import digest_kernels

    yield digest_kernels
    sys.path.remove(str(HERE))


@pytest.fixture(scope="module")
def base(kernels: Any) -> Code:
    code: Code = kernels.compiled(kernels.launch).code
    return code


def test_another_name_and_another_place_are_the_same_code(kernels: Any, base: Code) -> None:
    other = kernels.compiled(kernels.launch_renamed).code
    assert other.digest == base.digest and other.differs_from(base) == []
    assert [k.name for k in other.kernels] == ["renamed"] and [k.name for k in base.kernels] == ["scale"]
    assert base.arch == "sm_90a" and base.kernels[0].registers > 0
    assert base.toolchain["nvidia-cutlass-dsl"] == "4.8.1"


def test_line_information_is_no_part_of_it(kernels: Any, base: Code) -> None:
    assert kernels.compiled(kernels.launch, options="--generate-line-info").code.digest == base.digest


def test_another_process_makes_the_same(base: Code) -> None:
    """Hash seeds, addresses and scratch folders differ between processes."""
    words = [sys.executable, str(HERE / "digest_kernels.py"), "launch"]
    for seed in ("1", "2"):
        environment = {**os.environ, "PYTHONHASHSEED": seed}
        done = subprocess.run(words, env=environment, capture_output=True, text=True, check=True)
        assert done.stdout.strip() == base.digest


def test_another_constant_is_other_machine_code(kernels: Any, base: Code) -> None:
    other = kernels.compiled(kernels.launch, 4.0).code
    assert other.digest != base.digest
    assert other.differs_from(base) == ["scale: machine code"]


@pytest.mark.parametrize("host", ["launch_other_grid", "launch_pdl", "launch_cluster", "launch_smem"])
def test_each_part_of_the_launch_counts(kernels: Any, base: Code, host: str) -> None:
    other = kernels.compiled(getattr(kernels, host)).code
    assert other.kernels == base.kernels
    assert other.differs_from(base) == ["launch (grid rule, block, cluster, shared memory or PDL)"]


def test_kernels_stand_in_the_order_of_their_launch(kernels: Any) -> None:
    one, other = (kernels.compiled(host) for host in (kernels.launch_two, kernels.launch_two_swapped))
    assert [k.name for k in one.code.kernels] == ["renamed", "scale"]
    assert [k.name for k in other.code.kernels] == ["scale", "renamed"]
    assert [stage.name for stage in one.stages] == ["renamed", "scale"]
    assert one.code.digest != other.code.digest


def test_it_survives_a_record_and_an_entry_of_the_cache(kernels: Any, base: Code) -> None:
    from mla_var3.toolchain import aot

    back = Code.from_record(base.to_record())
    assert back == base and back.digest == base.digest and back.toolchain == base.toolchain
    kept = aot.from_json(aot.to_json(kernels.compiled(kernels.launch)))
    assert kept.code == base


def test_triton_and_cutile_have_one_too() -> None:
    pytest.importorskip("cuda.tile", reason="cuda-tile is not installed")
    from mla_var3.catalogue.registry import KernelId, get_plan
    from mla_var3.device import Device
    from mla_var3.workload.decode import MlaProblem

    for label in ("triton/flash_mla", "cutile-dsl/flash_mla"):
        plan = get_plan(KernelId.parse(label))

        def code(plan: Any = plan, **fields: Any) -> Code:
            made = plan(MlaProblem(**{"b": 2, "t": 512, "h": 16, **fields}), None, Device.get("h200"))
            found: Code = made.plan_empty().compile(None, Device.get("h200")).code
            return found

        first = code()
        assert first.kernels and first.toolchain, label
        assert code().digest == first.digest, label
        assert code(s=2).digest != first.digest, label


CUTILE = """
from mla_var3.device import Device
from mla_var3.catalogue.registry import KernelId, get_plan
from mla_var3.workload.decode import MlaProblem
plan = get_plan(KernelId.parse("cutile-dsl/flash_mla"))(MlaProblem(b=128, h=128), None, Device.get("h200"))
print(plan.plan_empty().compile(None, Device.get("h200")).code.digest)
"""


@pytest.mark.slow
def test_where_cutiles_source_lies_is_no_part_of_it(tmp_path: Path) -> None:
    """Another folder, and every line of a kernel further down. Nor is which machine code its compiler happens to make:
    of this kernel there are two."""
    pytest.importorskip("cuda.tile", reason="cuda-tile is not installed")
    package = Path(mla_var3.__file__).parent
    shutil.copytree(package, tmp_path / "mla_var3", ignore=shutil.ignore_patterns("__pycache__"))
    for file in (tmp_path / "mla_var3" / "kernel" / "cutile").rglob("*.py"):
        file.write_text(file.read_text().replace("from __future__", "\n\n\nfrom __future__", 1))
    digests = []
    for folder in (package.parent, tmp_path):
        environment = {**os.environ, "PYTHONPATH": str(folder)}
        words = [sys.executable, "-c", CUTILE]
        done = subprocess.run(words, env=environment, cwd=tmp_path, capture_output=True, text=True, check=True)
        digests.append(done.stdout.strip())
    assert len(digests[0]) == 16 and digests[0] == digests[1]


# ---------------------------------------------------------------- without a compiler
ONE = KernelCode("one", "a" * 16, "", 100, 1024)


def test_a_pipelines_code_is_that_of_its_stages_in_order() -> None:
    stages = [CompiledKernel(n, "sm_90a", Resources(), code=Code("sm_90a", (ONE,), (n,))) for n in ("a", "b")]
    whole = CompiledKernel.of_stages("both", "sm_90a", stages)
    assert whole.code == Code("sm_90a", (ONE, ONE), ("a", "b"))
    unknown = CompiledKernel("c", "sm_90a", Resources())
    assert CompiledKernel.of_stages("both", "sm_90a", [*stages, unknown]).code is None


def test_a_library_is_known_by_its_binary() -> None:
    code = Code("sm_90a", binary="b" * 16)
    assert Code.from_record(code.to_record()) == code
    assert code.differs_from(Code("sm_90a", binary="c" * 16)) == ["the library's binary"]
    assert "kernels" not in code.to_record()


def test_what_differs_is_named() -> None:
    code = Code("sm_90a", (ONE,), ("x",))
    others = {
        "architecture sm_90a and sm_100a": Code("sm_100a", (ONE,), ("x",)),
        "1 and 2 kernels": Code("sm_90a", (ONE, ONE), ("x",)),
        "one: registers": Code("sm_90a", (KernelCode("one", "a" * 16, "", 90, 1024),), ("x",)),
        "one: constants, static shared memory": Code("sm_90a", (KernelCode("one", "a" * 16, "c", 100, 0),), ("x",)),
    }
    for sentence, other in others.items():
        assert code.differs_from(other) == [sentence]
    names = KernelCode("two", "a" * 16, "", 100, 1024)
    assert code.digest == Code("sm_90a", (names,), ("x",), toolchain={"p": "1"}).digest


def test_names_and_hashes() -> None:
    assert plain_name("flash_mla_v23_0") == "flash_mla_v23"
    assert plain_name("kernel_cutlass_gemm_CopyAtom_x") == "gemm"
    assert len({hash_of(x) for x in (b"a", "b", {"a": 1}, {"a": 2})}) == 4
    assert hash_of({"a": 1, "b": 2}) == hash_of({"b": 2, "a": 1})
