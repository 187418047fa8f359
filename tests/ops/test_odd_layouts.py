"""Tensors that lie otherwise than kernels read them: the right result, or a sentence that names the argument."""

from __future__ import annotations

from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from odd_layouts import CALLS, kernels, wrong  # noqa: E402
from ops_fakes import CpuEngine  # noqa: E402

from mla_var3.catalogue import registry  # noqa: E402
from mla_var3.errors import Unsupported, UserError  # noqa: E402
from mla_var3.ops import absorb_gemm, rmsnorm  # noqa: E402
from running import in_tritons_interpreter  # noqa: E402

LANGUAGES = ("torch", "cutile-dsl", "triton", "cute-dsl")
CASES = [(call, kernel) for language in LANGUAGES for call, kernel in kernels(language).items()]
ON_CPU = [case for case in CASES if case[1].startswith(("torch/", "cutile-dsl/"))]


def here(kernel: str) -> str:
    if (reason := registry.missing(registry.KernelId.parse(kernel))) is not None:
        pytest.skip(reason)
    return kernel


@pytest.mark.parametrize(("call", "kernel"), ON_CPU)
def test_on_a_cpu(call: str, kernel: str) -> None:
    try:
        assert list(wrong(call, here(kernel), CpuEngine())) == []
    except Unsupported as refusal:
        pytest.skip(str(refusal))


@pytest.mark.slow
def test_in_tritons_interpreter() -> None:
    here("triton/absorb_gemm")
    tried = in_tritons_interpreter(str(Path(__file__).with_name("odd_layouts.py")), "triton").splitlines()
    assert tried == [f"tried {call}" for call in kernels("triton")] and len(tried) == 21


@pytest.mark.gpu
@pytest.mark.parametrize(("call", "kernel"), [*CASES, *((call, None) for call in CALLS)])
def test_on_a_gpu(call: str, kernel: str | None) -> None:
    try:
        assert list(wrong(call, kernel and here(kernel), None, "cuda")) == []
    except Unsupported as refusal:
        pytest.skip(str(refusal))


def test_what_cannot_be_written_is_refused_by_name() -> None:
    x, weight = torch.zeros(3, 2, 64).bfloat16(), torch.zeros(256, 64).bfloat16()
    room = torch.zeros(3, 2, 128).bfloat16()
    for out in (room[..., ::2], room[..., 1:65], torch.zeros(1, 2, 64).bfloat16().expand(3, 2, 64)):
        with pytest.raises(UserError, match=r"^out has strides .*its columns must lie beside each other"):
            absorb_gemm(x, weight, "q", out=out, kernel="torch/absorb_gemm", on=CpuEngine())


def test_copies_are_made_only_where_they_must() -> None:
    """A slice whose rows begin at multiples of 16 bytes is read where it lies."""

    class Watching(CpuEngine):
        def run(
            self, way: object, problem: object, inputs: object, outputs: object, schedule: object = None, *_: object
        ) -> None:
            self.read = inputs[0].data_ptr()  # type: ignore[index]

    engine, room = Watching(), torch.zeros(3, 2, 192).bfloat16()
    for x, same in ((room[..., :64], True), (room[..., 8:72], True), (room[..., ::3], False), (room[..., 1:65], False)):
        absorb_gemm(x, torch.zeros(256, 64).bfloat16(), "q", kernel="torch/absorb_gemm", on=engine)
        assert (engine.read == x.data_ptr()) == same
    rows = torch.zeros(4, 100).bfloat16()
    for x, same in ((rows[:, :64], True), (rows[:, 8:72], True), (rows[:, 1:65], False), (rows.T[:, :4], False)):
        rmsnorm(x, torch.zeros(x.shape[1]).bfloat16(), kernel="torch/rmsnorm", on=engine)
        assert (engine.read == x.data_ptr()) == same
