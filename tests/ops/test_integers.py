"""int64 indices, lengths, tables and offsets: no value stands for the one that its lower half is. Without a GPU, by
torch's and cuTile's versions, and by Triton's in its interpreter; behind functions, operators and FlashMLA's name."""

from __future__ import annotations

import functools
import re
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import integer_cases as cases  # noqa: E402
import torch.distributed as dist  # noqa: E402
from ops_fakes import CpuEngine, serve_on_cpu  # noqa: E402

from mla_var3.catalogue import registry  # noqa: E402
from mla_var3.ops import (  # noqa: E402
    context_parallel,
    merge_partials,
    mla_decode,
    mla_decode_cp,
    packed_mla_decode,
    sparse_mla_decode,
)
from mla_var3.ops import flash_mla as api  # noqa: E402
from mla_var3.ops.request import integers, narrowed  # noqa: E402
from running import in_tritons_interpreter  # noqa: E402

DOORS = ("function", "operator", "flash_mla")


def door(name: str, function: Any, kernel: str) -> Any:
    """A call of a function, of its operator, or of `flash_mla_with_kvcache`, with the function's arguments."""
    if name == "function":
        return functools.partial(function, return_lse=True, kernel=kernel)
    if name == "operator":
        operator = getattr(torch.ops.mla_var3, function.__name__)

        def through_operator(**given: Any) -> Any:
            return operator(**given, version=kernel)

        return through_operator

    def as_flash_mla(**given: Any) -> Any:
        layout = given.pop("layout", "bf16")
        named = {cases.FLASH_MLA.get(key, key): x for key, x in given.items()}
        for key in ("k_cache", "extra_k_cache"):
            if key in named and layout != "bf16":
                named[key] = named[key].unsqueeze(2).view(torch.float8_e4m3fn)
        named = {"block_table": None, "cache_seqlens": None, "softmax_scale": 192**-0.5, **named}
        meta = api.FlashMLASchedMeta()
        return api.flash_mla_with_kvcache(
            **named, head_dim_v=512, tile_scheduler_metadata=meta, is_fp8_kvcache=layout != "bf16"
        )

    return as_flash_mla


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> CpuEngine:
    """Functions and operators compute on the CPU."""
    engine = serve_on_cpu(monkeypatch)
    monkeypatch.setattr(api, "mla_decode", functools.partial(mla_decode, kernel="torch/flash_mla"))
    for function in (sparse_mla_decode, packed_mla_decode):
        monkeypatch.setattr(api, function.__name__, functools.partial(function, kernel="torch/sparse_mla"))
    return engine


# ---------------------------------------------------------------- the one place
@pytest.mark.parametrize("value", [*cases.VALUES, 0, 7, 41, (1 << 31) - 1, 1 << 31, -(1 << 31), -(1 << 31) - 1])
@pytest.mark.parametrize("bounds", [(), (0, 40)])
def test_a_value_becomes_the_nearest_that_may_be(value: int, bounds: tuple[int, ...]) -> None:
    least, most = bounds or (-(1 << 31), (1 << 31) - 1)
    found = narrowed(torch.tensor([[3, value], [value, 5]]).t(), *bounds)
    wanted = [[3, min(max(value, least), most)], [min(max(value, least), most), 5]]
    assert found.dtype == torch.int32 and found.is_contiguous() and found.tolist() == wanted


def test_int32_is_passed_on_as_it_is() -> None:
    given = torch.tensor([-1, 99], dtype=torch.int32)
    assert narrowed(given, 0, 40) is given
    assert integers("indices", given, (2,), given, 0, 40).data_ptr() == given.data_ptr()


def test_nothing_else_narrows_integers(repo_root: Path) -> None:
    """Where functions take a caller's integers, only `narrowed` makes int32 of them."""
    for folder in ("ops", "layers"):
        for path in sorted((repo_root / "src/mla_var3" / folder).glob("*.py")):
            found = re.findall(
                r".*(?:\.int\(\)|\.to\((?:dtype=)?torch\.int32|astype).*", path.read_text(encoding="utf-8")
            )
            allowed = {"request.py": 1, "jax.py": 1}.get(path.name, 0)
            assert len(found) == allowed, (path.name, found)


# ---------------------------------------------------------------- every function, every door
@pytest.mark.parametrize("name", DOORS)
def test_decode(on_cpu: CpuEngine, name: str) -> None:
    call = door(name, mla_decode, "torch/flash_mla")
    assert cases.hold(cases.decode_cases("cpu"), call) == 14
    if name != "flash_mla":
        assert cases.hold(cases.packed_query_cases("cpu"), call) == 7


@pytest.mark.parametrize("name", DOORS)
@pytest.mark.parametrize("layout", cases.SPARSE)
def test_sparse_decode(on_cpu: CpuEngine, layout: str, name: str) -> None:
    if (layout, name) == ("flat", "flash_mla"):
        pytest.skip("FlashMLA has no such layout")
    problem = cases.SPARSE[layout]
    found = cases.hold(
        cases.sparse_cases(problem, "cpu"), door(name, sparse_mla_decode, "torch/sparse_mla"), problem
    )  # fmt: skip
    assert found == (28 if problem.extra else 14)


@pytest.mark.parametrize("name", DOORS)
@pytest.mark.parametrize("layout", cases.PACKED)
def test_packed_decode(on_cpu: CpuEngine, layout: str, name: str) -> None:
    if (layout, name) == ("flat", "flash_mla"):
        pytest.skip("FlashMLA has no such layout")
    problem = cases.PACKED[layout]
    call = door(name, packed_mla_decode, "torch/sparse_mla")
    assert cases.hold(cases.packed_cases(problem, "cpu"), call, problem) == 14


def one_rank(rank: int, file: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=1)
    context_parallel.merge_partials = functools.partial(merge_partials, kernel="torch/merge_partials")
    call = functools.partial(mla_decode_cp, return_lse=True, kernel="torch/flash_mla", on=CpuEngine())
    assert cases.hold(cases.decode_cases("cpu"), call) == 14
    (_, _, given), *_ = cases.decode_cases("cpu")
    begin, end = (torch.full((3,), x, dtype=torch.int32) for x in (0, 1000))
    for causal in (False, True):
        some = {**given, "q": given["q"].repeat(1, 3, 1, 1), "causal": causal}
        wanted = call(**some, tokens=(begin, end))
        for value in cases.VALUES:
            wide = (begin.long().fill_(value), end.long()) if value < 0 else (begin.long(), end.long().fill_(value))
            for lengths in (given["seq_lens"], given["seq_lens"].long()):
                found = call(**{**some, "seq_lens": lengths}, tokens=wide)
                if value > 0:
                    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True)), value
        short = call(**{**some, "seq_lens": torch.tensor([-(1 << 63)] * 3)})
        assert not short[0].any() and bool((short[1] == float("inf")).all())
    dist.destroy_process_group()


def test_context_parallel_decode(tmp_path: Path) -> None:
    torch.multiprocessing.spawn(one_rank, (str(tmp_path / "meet"),), nprocs=1)


def test_jax(monkeypatch: pytest.MonkeyPatch) -> None:
    """With 64 bits, which JAX has where they are asked for, what is handed to XLA is judged as well."""
    jax = pytest.importorskip("jax", reason="the extra 'jax' is not installed")
    pytest.importorskip("jax_tvm_ffi", reason="the extra 'jax' is not installed")
    pytest.importorskip("cutlass", reason="nvidia-cutlass-dsl is not installed")
    import jax.numpy as jnp
    from ops_fakes import not_compiled

    from mla_var3.device import Device
    from mla_var3.ops import jax as module
    from mla_var3.toolchain import aot

    passed: list[Any] = []

    def noted(*arrays: Any) -> Any:
        passed.append(arrays)
        raise InterruptedError

    monkeypatch.setattr(Device, "detect", staticmethod(lambda index=0: Device.get("h200")))
    monkeypatch.setattr(aot, "load_or_compile", lambda *_, **__: not_compiled())
    monkeypatch.setattr(jax.ffi, "ffi_call", lambda *_, **__: noted)
    with jax.enable_x64(True):
        for cases_of in (cases.decode_cases, cases.packed_query_cases):
            for name, wide, narrow in cases_of("cpu"):
                argument = name.split()[0]
                with pytest.raises(InterruptedError):
                    module.mla_decode(**{key: jnp.from_dlpack(x.contiguous()) for key, x in wide.items()})
                found = passed[-1][list(wide).index(argument)]
                assert str(found.dtype) == "int32"
                if argument != "page_table":
                    assert found.tolist() == narrow[argument].tolist(), name
                else:
                    edge = (1 << 31) - 1 if int(wide[argument][1, -1]) > 0 else -(1 << 31)
                    assert found[1, -1] in (edge, -1), name
    assert len(passed) == 21


# ---------------------------------------------------------------- positions and slots, which no kernel narrows
@pytest.mark.parametrize("layout", [None, "v32", "v4", "flat", "v32_no_rope", "flat_no_rope"])
@pytest.mark.parametrize("language", ["torch", "cutile-dsl"])
@pytest.mark.parametrize("value", cases.BELOW)
def test_a_slot_far_below_zero_is_written_nowhere(layout: str | None, language: str, value: int) -> None:
    design = "rope_append" if layout is None else "packed_append"
    if f"{language}/{design}" not in {k.label for k in registry.all_kernels()}:
        pytest.skip(f"{language} has no {design}")
    if registry.missing(language):
        pytest.skip(str(registry.missing(language)))
    cases.slots_are_kept(layout, language, value, "cpu")


# ---------------------------------------------------------------- other languages
@pytest.mark.parametrize("label", ["cutile-dsl/flash_mla", "cutile-dsl/flash_mla_v2"])
def test_cutile_decode(on_cpu: CpuEngine, label: str) -> None:
    pytest.importorskip("cuda.tile", reason="cuda-tile is not installed")
    call = functools.partial(mla_decode, return_lse=True, kernel=label)
    assert cases.hold(cases.decode_cases("cpu", cases.FEW), call) == 4


@pytest.mark.parametrize("layout", ["v4"])  # the one that has all arguments
def test_cutile_sparse_decode(on_cpu: CpuEngine, layout: str) -> None:
    pytest.importorskip("cuda.tile", reason="cuda-tile is not installed")
    problem = cases.SPARSE[layout]
    call = functools.partial(sparse_mla_decode, return_lse=True, kernel="cutile-dsl/sparse_mla")
    assert cases.hold(cases.sparse_cases(problem, "cpu", cases.FEW), call, problem) == (8 if problem.extra else 4)


# What functions pass on is int32 in every layout (above); of the kernels one of each kind is asked, with two values, as
# an interpreter takes long. Triton's is chosen when a kernel is decorated, so a process has it or not.
TRITON = """
import functools
import integer_cases as cases
from ops_fakes import CpuEngine
from mla_var3.ops import mla_decode, packed_mla_decode, sparse_mla_decode

def of(function, design):
    return functools.partial(function, return_lse=True, kernel=f"triton/{design}", on=CpuEngine())

held = cases.hold(cases.decode_cases("cpu", cases.FEW), of(mla_decode, "flash_mla"))
for problem in [cases.SPARSE["v4"]]:
    held += cases.hold(cases.sparse_cases(problem, "cpu", cases.FEW), of(sparse_mla_decode, "sparse_mla"), problem)
for problem in [cases.PACKED["flat"]]:
    held += cases.hold(cases.packed_cases(problem, "cpu", cases.FEW), of(packed_mla_decode, "sparse_mla"), problem)
for value in cases.BELOW[:1]:
    for layout in (None, "v32", "v4", "flat", "v32_no_rope", "flat_no_rope"):
        cases.slots_are_kept(layout, "triton", value, "cpu")
        held += 1
print("held", held)
"""


@pytest.mark.slow
def test_triton() -> None:
    pytest.importorskip("triton")
    assert in_tritons_interpreter("-c", TRITON).split() == ["held", str(4 + 8 + 4 + 6)]
