"""The operators of torch on a GPU: torch's own check, and compiled functions that give an eager call's bits."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from ops_gpu import compile_ahead, same_bits  # noqa: E402

from mla_var3.ops import flash_mla, mla_decode  # noqa: E402
from mla_var3.workload.decode import MlaProblem, fifth_input, make_inputs  # noqa: E402

pytestmark = pytest.mark.gpu

PROBLEM = MlaProblem(b=3, h=16, t=500, lengths=[500, 0, 129])
CAUSAL = MlaProblem(b=2, h=128, s=2, causal=True, t=300, lengths=[300, 65])
PACKED = MlaProblem(b=3, h=16, causal=True, t=300, lengths=[300, 65, 20], queries=[1, 7, 4])
TREE = MlaProblem(b=2, h=16, s=4, t=300, lengths=[300, 65], tree=True)
PROBLEMS = [PROBLEM, CAUSAL, PACKED, TREE]
BATCHES = [MlaProblem(b=b, h=16, t=t) for b, t in ((3, 500), (5, 200), (8, 700))]


@pytest.fixture(scope="module", autouse=True)
def compiled() -> None:
    compile_ahead([*PROBLEMS, *BATCHES])


def call_of(problem: MlaProblem, seed: int = 0) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Tensors and options of a call of `mla_decode`."""
    given = make_inputs(problem, "cuda", seed=seed)
    fifth = {name: x.bool() if name == "mask" else x for name, x in fifth_input(*given).items()}
    return given[:4], {"causal": problem.causal, **fifth}


def same(found: Any, wanted: Any) -> bool:
    return all(same_bits(a, b) for a, b in zip(found, wanted, strict=True))


@pytest.mark.parametrize("problem", PROBLEMS, ids=lambda p: p.label)
def test_torchs_own_check_passes(problem: MlaProblem) -> None:
    given, options = call_of(problem)
    torch.library.opcheck(torch.ops.mla_var3.mla_decode.default, given, options)
    out, lse = mla_decode(*given, return_lse=True, **options)
    into = {"target": torch.zeros_like(out), "lse": torch.zeros_like(lse)}
    torch.library.opcheck(torch.ops.mla_var3.mla_decode_into.default, given, {**options, **into})


@pytest.mark.parametrize("mode", [None, "reduce-overhead"])
@pytest.mark.parametrize("problem", PROBLEMS, ids=lambda p: p.label)
def test_a_compiled_function_gives_the_bits_of_an_eager_call(problem: MlaProblem, mode: str | None) -> None:
    """Without a graph break, with and without CUDA graphs around it, and for other tensors than the first call's."""

    def step(q: Any, cache: Any, table: Any, lens: Any, **options: Any) -> Any:
        return mla_decode(-q, cache, table, lens, return_lse=True, **options)

    torch._dynamo.reset()
    ready = torch.compile(step, fullgraph=True, mode=mode)
    for seed in range(4):
        given, options = call_of(problem, seed)
        found = tuple(x.clone() for x in ready(*given, **options))
        assert same(found, step(*given, **options)), f"call {seed}"


def test_a_compiled_function_follows_the_batch() -> None:
    """One compilation for every b and width of the page table."""
    torch._dynamo.reset()
    ready = torch.compile(lambda *given: mla_decode(*given), fullgraph=True, dynamic=True)
    for problem in BATCHES:
        given = make_inputs(problem, "cuda")
        assert same_bits(ready(*given), mla_decode(*given))


def test_a_compiled_function_writes_into_the_callers_tensor() -> None:
    given, _ = call_of(PROBLEM)
    wanted = mla_decode(*given)
    out = torch.full_like(wanted, 7.0)
    torch._dynamo.reset()
    torch.compile(lambda out, *given: mla_decode(*given, out=out), fullgraph=True)(out, *given)
    assert same_bits(out, wanted)


def test_flash_mlas_function_compiles_without_a_break() -> None:
    given, _ = call_of(CAUSAL)
    meta = flash_mla.get_mla_metadata()[0]
    torch._dynamo.reset()
    ready = torch.compile(
        lambda meta, *given: flash_mla.flash_mla_with_kvcache(*given, 512, meta, causal=True), fullgraph=True
    )
    found = [ready(meta, *given) for _ in range(2)]
    eager = flash_mla.get_mla_metadata()[0]
    wanted = flash_mla.flash_mla_with_kvcache(*given, 512, eager, causal=True)
    assert same(found[0], wanted) and same(found[1], wanted)
    assert meta.tile_scheduler_metadata.shape == eager.tile_scheduler_metadata.shape
