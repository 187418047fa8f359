"""What the runtime asks of every CuTe version, compiled or not."""

from __future__ import annotations

import inspect
import re
from types import SimpleNamespace
from typing import Any

import pytest
from compiled import compiled
from reading_sass import overwritten_operands

from mla_var3.catalogue import registry
from mla_var3.device import Device
from mla_var3.toolchain.sass import functions
from mla_var3.workload.decode import MlaProblem

pytest.importorskip("cutlass", reason="nvidia-cutlass-dsl is not installed")

ALL = [k for k in registry.all_kernels() if k.language == "cute-dsl"]
#: Those that decode.
VERSIONS = [k for k in ALL if k.design == "flash_mla"]
#: Columns of latent and rope, beside 512 + 64, of versions that take them.
WIDTHS = [(512, 0), (256, 64), (256, 32)]
WIDE = [k for k in VERSIONS if k.version >= 21]


@pytest.mark.parametrize("kernel", ALL, ids=lambda k: k.label)
def test_a_version_is_read_in_eight_files_and_one_room(kernel: registry.KernelId) -> None:
    """Its own, the host side, primitives; and split-KV, which has a page of its own, where the version splits."""
    files = [path for path in registry.source_files(kernel) if "cute_python" in path.parts]
    files = [path for path in files if path.name != "__init__.py"]
    splits = {path.name for path in files if path.parent.name == "split_kv"}
    assert 0 < len(files) - len(splits) <= 8
    attention = kernel.design in ("flash_mla", "flash_mla_mma", "sparse_mla", "sparse_mla_mma")
    assert bool(splits) == attention, "what does not split sequences does not change with split-KV"
    assert ("walk.py" in splits) == (attention and kernel.label != "cute-dsl/flash_mla")


@pytest.mark.parametrize("kernel", ALL, ids=lambda k: k.label)
def test_a_bundle_holds_what_a_plan_asks_for_and_a_call_gives_what_that_takes(
    kernel: registry.KernelId, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kernels are compiled under their names, and a plan looks its functions up by name: the two must be the same."""
    from mla_var3.kernel.cute_python import host
    from mla_var3.toolchain import aot

    asked: set[str] = set()
    wanted: dict[str, int] = {}
    given: dict[str, int] = {}
    compiler = host.compiler

    def counted(host_fn: Any, arguments_fn: Any, name: str) -> Any:
        parameters = inspect.signature(host_fn).parameters.values()
        wanted[name] = sum("Constexpr" not in str(p.annotation) for p in parameters) - 1  # the stream
        return compiler(host_fn, arguments_fn, name)

    def compiled_host(plan: Any, name: str, compile_fn: Any, **_: Any) -> Any:
        asked.add(name)
        return SimpleNamespace(handle=lambda *arguments: given.update({name: len(arguments)}))

    monkeypatch.setattr(host, "compiler", counted)
    monkeypatch.setattr(aot, "compiled_host", compiled_host)
    plan_type = registry.get_plan(kernel)
    computed = plan_type.workload
    small = computed.problem(**computed.sample(True, {}))
    if not plan_type.requires.accepts(small):
        small = small.replace(layout="bf16")
    problem = MlaProblem(b=1, h=16, t=2048) if kernel in VERSIONS else small
    plan = plan_type(problem, None, Device.get("h200"))
    bound = plan.plan(*plan.prepare_inputs("cpu"))
    stages = getattr(bound, "stages", (bound,))
    assert asked and asked == {stage.name for stage in stages if not stage.comes_compiled}
    for stage in stages:
        if not stage.comes_compiled:
            stage.launch()
    assert given == {name: wanted[name] for name in asked}


@pytest.mark.parametrize("kernel", VERSIONS, ids=lambda k: k.label)
def test_splits_do_not_compile_again(kernel: registry.KernelId) -> None:
    from mla_var3.toolchain.aot import code_knobs

    tiling = registry.get_plan(kernel)(MlaProblem(h=16), None, Device.get("h200")).tiling
    of_launch = {"num_splits", "workers", "split_tokens"} & set(tiling.to_record())
    assert of_launch and not of_launch & set(code_knobs(tiling))


@pytest.mark.parametrize("kernel", VERSIONS, ids=lambda k: k.label)
def test_machine_code_of_the_loop(kernel: registry.KernelId) -> None:
    """What results do not show: operands of products in flight stay as they are, and the loop of products holds neither
    a sleeping wait nor moves of addresses into uniform registers (see `devlogs/flash_mla`)."""
    check_machine_code(kernel, MlaProblem(h=16 if kernel.version == 24 else 128))


def test_machine_code_of_a_query_tile_that_is_not_full() -> None:
    """A branch where query rows end would make ptxas move addresses of the loop into uniform registers."""
    check_machine_code(registry.KernelId.parse("cute-dsl/flash_mla_v23"), MlaProblem(h=40))


@pytest.mark.parametrize(("k", "p"), WIDTHS)
@pytest.mark.parametrize("kernel", WIDE, ids=lambda k: k.label)
def test_machine_code_of_other_widths(kernel: registry.KernelId, k: int, p: int) -> None:
    check_machine_code(kernel, MlaProblem(h=16 if kernel.version == 24 else 128, k=k, p=p))


def check_machine_code(kernel: registry.KernelId, problem: MlaProblem) -> None:
    h200 = Device.get("h200")
    plan = registry.get_plan(kernel)(problem, None, h200)
    made = compiled(plan)
    # Of the kernel with the most products. Producers of v23 have 24 registers, the schedule's numbers among them, and
    # its consumers keep what begins and ends a split in local memory. The loop, below, may not.
    assert made.resources.spill_bytes <= (160 if kernel.version == 23 else 24)
    sass = made.artefacts["sass"].read_text()
    assert sass.count("HGMMA") > 50 and overwritten_operands(sass) == []
    if kernel.version:
        body = max(functions(sass).values(), key=lambda body: str(body).count("HGMMA"))
        loop = loop_of_products(body, (problem.k + problem.p) // 16)
        costly = r"\b(R2UR|NANOSLEEP|LDL|STL)\b" if kernel.version == 23 else r"\b(NANOSLEEP|LDL|STL)\b"
        assert [line for line in loop if re.search(costly, line)] == []


@pytest.mark.parametrize("page", [1, 16])
@pytest.mark.parametrize("label", ["cute-dsl/flash_mla_v23", "cute-dsl/flash_mla_v24"])
def test_machine_code_of_small_pages(label: str, page: int) -> None:
    """Pages of 16 tokens are read by TMA, as those of 32 are, and those of one token are gathered; the loop of
    products stays as it is."""
    h200, kernel = Device.get("h200"), registry.KernelId.parse(label)
    plan = registry.get_plan(kernel)(MlaProblem(h=16 if kernel.version == 24 else 128, page=page), None, h200)
    made = compiled(plan)
    counts = made.resources.instructions
    # Producers of v23 have 24 registers: they keep some of a split's and the schedule's numbers in local memory.
    assert made.resources.spill_bytes <= (24 if kernel.version == 24 else 160)
    assert (counts["UTMALDG"] == 0) == (page == 1)
    sass = made.artefacts["sass"].read_text()
    assert overwritten_operands(sass) == []
    loop = loop_of_products(max(functions(sass).values(), key=lambda body: str(body).count("HGMMA")), 36)
    assert [line for line in loop if re.search(r"\b(NANOSLEEP|LDL|STL)\b", line)] == []


def test_pages_that_lie_apart_change_the_host_function_alone_and_strides_no_product() -> None:
    """Without a GPU nothing else compiles code that reads and writes strides."""
    h200, kernel = Device.get("h200"), registry.KernelId.parse("cute-dsl/flash_mla_v24")
    strided = {"strided": True, "strided_out": True}
    problems = [MlaProblem(h=16), MlaProblem(h=16, strided_pages=True), MlaProblem(h=16, **strided)]
    made = [compiled(registry.get_plan(kernel)(pd, None, h200)) for pd in problems]
    plain, apart, of_rows = (x.code for x in made)
    assert plain.kernels == apart.kernels and plain.launch != apart.launch
    assert of_rows.kernels != plain.kernels and [x.name for x in of_rows.kernels] == [x.name for x in plain.kernels]
    assert made[2].resources.spill_bytes == made[0].resources.spill_bytes == 0


@pytest.mark.parametrize("label", ["cute-dsl/flash_mla_v23", "cute-dsl/flash_mla_v24"])
def test_any_page_is_taken(label: str) -> None:
    plan = registry.get_plan(registry.KernelId.parse(label))
    for page in (1, 2, 3, 8, 15, 16, 24, 32, 48, 64, 96, 100, 128, 4096):
        assert plan(MlaProblem(h=16, page=page), None, Device.get("h200")).tiling.validate(MlaProblem(h=16, page=page))


def loop_of_products(sass: str, products: int) -> list[str]:
    """The instructions from a branch back's target to the branch: the shortest loop that holds a tile's products, so
    many at least."""
    lines = [line for line in sass.splitlines() if re.search(r"/\*[0-9a-f]{4,5}\*/", line)]
    at: dict[str, int] = {}
    for i, line in enumerate(lines):
        found = re.search(r"/\*([0-9a-f]{4,5})\*/", line)
        assert found is not None
        at[found[1].lstrip("0")] = i
    loops = []
    for end, line in enumerate(lines):
        back = re.search(r"\bBRA (?:U\w+, )?(?:`\()?0x([0-9a-f]+)", line)
        start = at.get(back[1]) if back else None
        if start is not None and start < end:
            loops.append(lines[start : end + 1])
    full = [loop for loop in loops if sum("HGMMA" in line for line in loop) >= products]
    assert full, "no loop with a tile's products in this code"
    return min(full, key=len)


@pytest.mark.parametrize("kernel", WIDE, ids=lambda k: k.label)
def test_widths_are_refused_with_a_reason(kernel: registry.KernelId) -> None:
    plan_type, h200 = registry.get_plan(kernel), Device.get("h200")
    for k, p in (*WIDTHS, (512, 64)):
        plan = plan_type(MlaProblem(h=16, k=k, p=p), None, h200)
        assert plan.supported() and plan.feasible()
    for fields, word in (({"k": 384}, "k = 384"), ({"p": 128}, "p = 128"), ({"p": 8}, "p = 8")):
        assert word in plan_type(MlaProblem(h=16, **fields), None, h200).supported().reason


def test_what_is_loaded_is_freed_by_exactly_one_consumer() -> None:
    from mla_var3.kernel.cute_python.mla.flash_mla.flash_mla_v23.flash_mla_v23 import FlashMlaV23Tiling

    for k, p in (*WIDTHS, (512, 64)):
        geometry = FlashMlaV23Tiling().geometry(MlaProblem(k=k, p=p))
        assert geometry.stage_elements == 64 * 64 * (geometry.p_panel + 1)
        assert geometry.panels == geometry.p_panel + (p > 0) and geometry.slices == (k + p) // 16
        for stage in (0, 1):
            freed = [*geometry.freed_by(stage, 0), *geometry.freed_by(stage, 1)]
            assert sorted(freed) == list(range(geometry.panels))
            assert (geometry.p_panel in geometry.freed_by(stage, 1 - stage)) == (p > 0)


def test_a_version_takes_every_model() -> None:
    import yaml

    from mla_var3 import paths

    for name in paths.options("model"):
        dims = yaml.safe_load(paths.option_file("model", name).read_text())
        assert dims.pop("name") == name
        plans = [registry.get_plan(kernel)(MlaProblem(**dims), None, Device.get("h200")) for kernel in WIDE]
        assert any(plan.supported() and plan.feasible() for plan in plans), name


def test_a_launcher_converts_tensors_once_and_leaves_the_first_to_name_the_stream() -> None:
    import torch
    import tvm_ffi

    from mla_var3.kernel.cute_python import host

    tensors = [torch.zeros(2, 3), torch.arange(4, dtype=torch.int32), torch.empty(0, 5)]
    seen: list[tuple[object, ...]] = []
    launch = host.launcher(lambda *arguments: seen.append(arguments), *tensors, 0.5, 3)
    launch(None)
    launch(None)
    first, lengths, nothing, scale, splits = seen[0]
    assert first is tensors[0]
    assert isinstance(lengths, tvm_ffi.Tensor)
    assert isinstance(nothing, tvm_ffi.Tensor)
    assert tuple(nothing.shape) == (0, 5)
    assert (scale, splits) == (0.5, 3)
    assert all(a is b for a, b in zip(seen[0], seen[1], strict=True))
    tensors[1][2] = 40
    assert torch.from_dlpack(lengths).tolist() == [0, 1, 40, 3]
