"""Strides of a call without a GPU: what versions are given as it is, what is copied for them, what is refused."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from ops_fakes import CpuEngine  # noqa: E402
from public_calls import attend, same, touched  # noqa: E402

from mla_var3.catalogue import registry  # noqa: E402
from mla_var3.device import Device  # noqa: E402
from mla_var3.errors import UserError  # noqa: E402
from mla_var3.ops import flash_mla, ways  # noqa: E402
from mla_var3.workload import decode, sparse_decode  # noqa: E402
from mla_var3.workload.decode import MlaProblem, apart  # noqa: E402
from mla_var3.workload.sparse_decode import SparseProblem  # noqa: E402

DENSE = {
    "plain": MlaProblem(h=4, s=2, b=3, t=1, lengths=[70, 0, 129]),
    "one token": MlaProblem(h=4, b=3, t=1, lengths=[70, 0, 129]),
    "packed": MlaProblem(h=4, b=3, t=1, lengths=[70, 0, 129], queries=[2, 0, 3], causal=True),
    "tree": MlaProblem(h=4, s=3, b=2, t=1, lengths=[70, 129], tree=True),
}
OVER = {
    "sparse": SparseProblem(b=3, s=2, h=8, t=256, topk=64),
    "bf16": SparseProblem(b=3, s=2, h=8, t=256, topk=64, layout="bf16"),
    "extra": SparseProblem(b=3, h=8, t=256, topk=64, layout="v4", extra=32, extra_t=128, sink=True),
    "paged": SparseProblem(b=3, h=8, t=256, paged=True),
}
#: A strided call of each function, and where its strided tensors stand among the inputs of a version.
PROBLEMS: dict[str, Any] = {**DENSE, **OVER}


def call(problem: Any, inputs: tuple[Any, ...], on: Any, kernel: str | None, **options: Any) -> Any:
    return attend(problem, inputs, kernel=kernel, on=on, **{"scale": 0.05, **options})


def made(problem: Any, seed: int = 0) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """The same inputs, contiguous and strided."""
    make = decode.make_inputs if isinstance(problem, MlaProblem) else sparse_decode.make_inputs
    return make(problem, "cpu", seed=seed), make(problem.replace(strided=True), "cpu", seed=seed)


def results_of(problem: Any, q: Any) -> tuple[Any, Any]:
    """New tensors for out and lse."""
    workload = decode if isinstance(problem, MlaProblem) else sparse_decode
    found: tuple[Any, Any] = workload.new_outputs(problem, q)
    return found


def oracle(problem: Any) -> str:
    return "torch/flash_mla" if isinstance(problem, MlaProblem) else "torch/sparse_mla"


class Spy(CpuEngine):
    """Keeps what it is asked to compute on, and computes nothing."""

    def run(self, way: Any, problem: Any, inputs: Any, outputs: Any, schedule: Any = None, *_: Any) -> None:
        self.problem, self.inputs, self.outputs = problem, inputs, outputs


# ---------------------------------------------------------------- read and written as they are
@pytest.mark.parametrize("name", PROBLEMS)
def test_results_are_those_of_contiguous_tensors(name: str) -> None:
    problem = PROBLEMS[name]
    plain, strided = made(problem)
    assert sum(not x.is_contiguous() for x in strided) == sum(not x.is_contiguous() for x in plain) + 2 + (
        name == "extra"
    )
    engine, kernel = CpuEngine(), oracle(problem)
    wanted = call(problem, plain, engine, kernel)
    assert same(call(problem, strided, engine, kernel), wanted)
    out, lse = apart(torch.zeros_like(wanted[0]), 7.0), apart(torch.zeros_like(wanted[1]).unsqueeze(-1), 7.0, 1)[..., 0]
    found = call(problem, strided, engine, kernel, out=out, lse=lse)
    assert found[0] is out and found[1] is lse and same(found, wanted)
    assert touched(out, 7.0) == 0 and touched(lse, 7.0) == 0
    turned = [torch.full_like(x.transpose(0, 1), 7.0).transpose(0, 1) for x in wanted]
    assert same(call(problem, plain, engine, kernel, out=turned[0], lse=turned[1]), wanted)


READS = {
    "torch/flash_mla": True, "cute-dsl/flash_mla_v23": True, "cute-dsl/flash_mla_v24": True,
    "cute-dsl/flash_mla": True, "triton/flash_mla": False, "torch/sparse_mla": True, "cute-dsl/sparse_mla": True,
    "cute-dsl/sparse_mla_v2": True, "triton/sparse_mla": False,
}  # fmt: skip


@pytest.mark.parametrize("kernel", READS)
def test_strides_are_passed_on_to_versions_that_read_them(kernel: str) -> None:
    if (reason := registry.missing(registry.KernelId.parse(kernel))) is not None:
        pytest.skip(reason)
    problem = PROBLEMS["one token" if "flash" in kernel else "bf16" if kernel == "cute-dsl/sparse_mla" else "sparse"]
    engine, reads = Spy(), READS[kernel]
    _, strided = made(problem)
    wanted = [apart(torch.zeros_like(x), 7.0) for x in results_of(problem, strided[0])]
    call(problem, strided, engine, kernel, out=wanted[0], lse=wanted[1])
    gaps = [0, 2]
    assert not any(strided[i].is_contiguous() for i in gaps)
    for i in gaps:
        assert torch.equal(engine.inputs[i].nan_to_num(), strided[i].nan_to_num())
        assert engine.inputs[i].is_contiguous() != reads
        assert (engine.inputs[i].data_ptr() == strided[i].data_ptr()) == reads
    for found, given in zip(engine.outputs, wanted, strict=True):
        assert (found.data_ptr() == given.data_ptr()) == reads
        assert found.is_contiguous() != reads
    assert engine.problem.strided == (reads and kernel != "cute-dsl/sparse_mla_v2"), "its code is the same either way"
    assert engine.problem.strided_out == reads
    plain, _ = made(problem)
    call(problem, plain, engine, kernel)
    assert engine.problem == engine.problem.replace(strided=False, strided_out=False)
    assert [x.data_ptr() for x in engine.inputs[:4]] == [x.data_ptr() for x in plain[:4]]


@pytest.mark.parametrize(
    "fields",
    [{}, {"h": 64}, {"h": 12, "s": 1}, {"layout": "v4"}, {"h": 12}, {"layout": "v41"}, {"layout": "flat"}],
)
def test_strided_results_are_written_where_they_lie_in_every_layout(fields: dict[str, Any]) -> None:
    pytest.importorskip("cutlass", reason="nvidia-cutlass-dsl is not installed")
    problem, engine = PROBLEMS["sparse"].replace(**fields), Spy()
    plain, strided = made(problem)
    out, lse = (apart(torch.zeros_like(x), 7.0) for x in results_of(problem, plain[0]))
    call(problem, strided, engine, "cute-dsl/sparse_mla_v2", out=out, lse=lse)
    assert engine.problem.strided_out and not engine.outputs[0].is_contiguous()
    assert engine.inputs[0].data_ptr() == strided[0].data_ptr(), "inputs are read as they are"


@pytest.mark.parametrize("split", [None, 1024])
@pytest.mark.parametrize("h", [8, 128])
def test_the_version_of_a_contiguous_call_computes_a_strided_one(h: int, split: int | None) -> None:
    """So that it gives the same bits."""
    pytest.importorskip("cutlass", reason="nvidia-cutlass-dsl is not installed")
    problem = MlaProblem(b=3, h=h, t=200)
    plain, strided = made(problem)
    keys = []
    for inputs in (plain, strided):

        class Keeps(Spy):
            def run(self, way: Any, *others: Any) -> None:
                keys.append(way.key)
                super().run(way, *others)

        engine = Keeps()
        call(problem, inputs, engine, None, fixed_split=split)
        assert engine.problem.strided == (inputs is strided)
        plan = registry.get_plan(keys[-1][0])(engine.problem, None, Device.get("h200"))
        assert plan.supported()
    assert keys[0] == keys[1]


def test_strides_of_a_version_that_reads_none_are_copied_both_ways(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = DENSE["plain"]
    plan = registry.get_plan(registry.KernelId.parse("torch/flash_mla"))
    without = dataclasses.replace(plan.requires, options=("strided_pages", "packed", "tree"))
    ways._taken.cache_clear()
    monkeypatch.setattr(plan, "requires", without)
    plain, strided = made(problem)
    engine = CpuEngine()
    wanted = call(problem, plain, engine, "torch/flash_mla")
    out, lse = apart(torch.zeros_like(wanted[0]), 7.0), apart(torch.zeros_like(wanted[1]), 7.0)
    try:
        assert same(call(problem, strided, engine, "torch/flash_mla", out=out, lse=lse), wanted)
    finally:
        ways._taken.cache_clear()
    assert touched(out, 7.0) == 0 and touched(lse, 7.0) == 0 and engine.planned == 1


def test_flash_mlas_function_takes_results_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """By name, as vLLM's FlashMLA takes out."""
    engine = CpuEngine()
    monkeypatch.setattr(flash_mla, "engine", lambda: engine)
    for name in ("mla_decode", "packed_mla_decode", "sparse_mla_decode"):
        kernel = "torch/flash_mla" if name == "mla_decode" else "torch/sparse_mla"
        function = functools.partial(getattr(flash_mla, name), on=engine, kernel=kernel)
        monkeypatch.setattr(flash_mla, name, function)
    for name in ("one token", "sparse", "paged"):
        problem = PROBLEMS[name]
        plain, strided = made(problem)
        packed: dict[str, Any] = {} if name == "one token" else {"is_fp8_kvcache": True}
        q, cache, third = strided[:3]
        table, lens = (None, None) if name == "sparse" else (third, strided[3])
        if name == "sparse":
            packed["indices"] = third
        wanted = call(problem, plain, engine, oracle(problem), scale=576**-0.5)
        out, lse = apart(torch.zeros_like(wanted[0]), 7.0), apart(torch.zeros_like(wanted[1]), 7.0)
        cache = cache if cache.dim() == 4 else cache.unsqueeze(2)
        meta = flash_mla.get_mla_metadata()[0]
        found = flash_mla.flash_mla_with_kvcache(q, cache, table, lens, 512, meta, **packed, out=out, lse=lse)
        assert found[0] is out and found[1] is lse and same(found, wanted)
        assert touched(out, 7.0) == 0 and touched(lse, 7.0) == 0


# ---------------------------------------------------------------- copied, or refused
def wide(x: Any, more: int) -> Any:
    """A view with rows so many elements further apart."""
    return apart(x, 0.0, more)


@pytest.mark.parametrize("name", ["plain", "sparse", "bf16"])
def test_queries_that_no_version_reads_are_copied(name: str) -> None:
    problem, engine = PROBLEMS[name], Spy()
    plain, _ = made(problem)
    q = plain[0]
    between = torch.zeros(q.numel() + 1, dtype=q.dtype)[1:].view(q.shape)
    odd = {
        "rows of 1,160 bytes": wide(q, 4),
        "columns apart": q.transpose(2, 3).contiguous().transpose(2, 3),
        "rows over each other": q[:, :1].expand(q.shape),
        "an element behind 16 bytes": between.copy_(q),
    }
    for what, each in odd.items():
        call(problem, (each, *plain[1:]), engine, oracle(problem))
        assert torch.equal(engine.inputs[0], each) and engine.inputs[0].is_contiguous(), what
        assert engine.inputs[0].data_ptr() != each.data_ptr() and not engine.problem.strided, what


def test_page_tables_and_indices_may_have_rows_over_each_other_and_no_columns_apart() -> None:
    for name in ("plain", "sparse"):
        problem, engine = PROBLEMS[name], Spy()
        plain, _ = made(problem)
        third = plain[2]
        shared = third[:1].expand(third.shape)
        call(problem, (*plain[:2], shared, *plain[3:]), engine, oracle(problem))
        assert engine.inputs[2].data_ptr() == shared.data_ptr() and engine.problem.strided
        turned = third.movedim(-1, 0).contiguous().movedim(0, -1)
        if not turned.is_contiguous():
            call(problem, (*plain[:2], turned, *plain[3:]), engine, oracle(problem))
            assert engine.inputs[2].is_contiguous() and torch.equal(engine.inputs[2], third)
            assert not engine.problem.strided


ROWS = r"its columns must lie beside each other, and its rows at multiples of 16 bytes, none over another\.$"


@pytest.mark.parametrize("name", ["plain", "packed", "sparse", "paged"])
def test_results_that_no_version_writes_are_refused(name: str) -> None:
    problem, engine = PROBLEMS[name], Spy()
    plain, _ = made(problem)
    out, lse = results_of(problem, plain[0])
    for wrong, words in (
        ({"out": wide(out, 4)}, f"^out has strides .*: {ROWS}"),
        ({"out": torch.cat([out, out], -1)[..., ::2]}, f"^out has strides .*: {ROWS}"),
        ({"out": out[..., :1, :].expand(out.shape)}, f"^out has strides .*: {ROWS}"),
        ({"out": torch.zeros(out.numel() + 1, dtype=out.dtype)[1:].view(out.shape)}, f"^out has strides .*: {ROWS}"),
        (
            {"lse": lse[:1].expand(lse.shape)},
            r"^lse has strides .*: it must start at a multiple of 4 bytes, with no element over another\.$",
        ),
    ):
        with pytest.raises(UserError, match=words):
            call(problem, plain, engine, oracle(problem), **wrong)
