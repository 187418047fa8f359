"""cuTile's flash_mla: Hopper code for its default tilings, one specialisation for all sizes, and graphs on a GPU."""

# ruff: noqa: E402 - the imports below need what importorskip found
from __future__ import annotations

import inspect
from typing import Any

import pytest

torch = pytest.importorskip("torch")
ct = pytest.importorskip("cuda.tile", reason="cuda-tile is not installed")

from mla_var3.device import Device
from mla_var3.kernel.cutile.mla.flash_mla.flash_mla.flash_mla import FlashMlaPlan, FlashMlaTiling, choose_splits
from mla_var3.kernel.cutile.mla.flash_mla.flash_mla.flash_mla import flash_mla as main_kernel
from mla_var3.kernel.cutile.prims.combine import combine, warm_up
from mla_var3.runtime import CtKernel
from mla_var3.workload.decode import MlaProblem

H200 = Device.get("h200")
ROWS = FlashMlaTiling()
SWAPPED = FlashMlaTiling(swapped=True, tile_m=16)


# ---------------------------------------------------------------- what the compiler makes of it
@pytest.mark.parametrize(
    ("heads", "tiling", "products"), [(128, ROWS, 104), (16, SWAPPED, 208)], ids=["heads-m", "swapped"]
)
def test_default_tilings_compile_to_hopper_code(heads: int, tiling: FlashMlaTiling, products: int) -> None:
    plan = FlashMlaPlan(MlaProblem(b=128, t=4096, h=heads), device=H200)
    assert plan.tiling == tiling
    made = plan.plan_empty().compile(None, H200)
    count, taken = made.resources.instructions, made.resources
    assert made.warnings == ()
    # As many products as two loops need: a compiler that duplicates a loop, or unrolls it, makes more.
    assert count["HGMMA"] == products and count["HMMA"] == 0
    # TMA for Q and for the tokens; 384 threads are two warp groups at work and one that loads.
    assert count["UTMALDG"] == 18 and count["UTMASTG"] > 0
    assert taken.threads == 384 and taken.registers <= 168
    assert taken.spill_bytes == 0 and taken.stack_bytes == 0
    assert taken.smem <= H200.smem_per_block


def test_the_combine_kernel_is_small() -> None:
    plan = FlashMlaPlan(MlaProblem(b=1, t=4096, h=128), device=H200)
    made = plan.plan_empty().stages[1].compile(None, H200)
    assert made.name == "combine" and made.warnings == ()
    assert made.resources.spill_bytes == 0 and made.resources.ctas_per_sm >= 6


# ---------------------------------------------------------------- which code a launch asks for
def _mangled(kernel: Any) -> str:
    kernel = kernel.stages[0] if hasattr(kernel, "stages") else kernel
    return kernel.signature_fn(kernel.tiling).with_mangled_symbol("flash_mla").symbol


@pytest.mark.parametrize("heads", [16, 128])
def test_sizes_do_not_change_the_signature(heads: int) -> None:
    problems = [MlaProblem(b=b, t=t, h=heads) for b, t in ((1, 65536), (16, 4096), (128, 4096), (7, 1), (3, 1000))]
    plans = [FlashMlaPlan(pd, device=H200) for pd in problems]
    assert len({plan.num_splits(pd.b, pd.max_pages) > 1 for plan, pd in zip(plans, problems, strict=True)}) == 2
    assert len({_mangled(plan.plan_empty()) for plan in plans}) == 1
    assert _mangled(FlashMlaPlan(MlaProblem(h=heads, causal=True), device=H200).plan_empty()) != _mangled(
        plans[0].plan_empty()
    )


class _Launches:
    """In place of `ct.launch`: the kernel and grid of each launch, and what it would be specialised for."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.seen: list[tuple[Any, tuple[Any, ...], tuple[int, ...]]] = []
        patch.setattr(ct, "launch", self)
        patch.setattr(CtKernel, "on_cpu", False)  # CPU tensors stand for a GPU's
        patch.setattr(torch.cuda, "current_stream", lambda *_: None)

    def __call__(self, stream: Any, grid: tuple[int, ...], kernel: Any, args: tuple[Any, ...]) -> None:
        parameters = inspect.signature(kernel._pyfunc).parameters.values()
        key = tuple(self._of(p, a) for p, a in zip(parameters, args, strict=True))
        self.seen.append((kernel, key, grid))

    @staticmethod
    def _of(parameter: inspect.Parameter, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return value.dtype, tuple(value.shape), value.stride(), value.data_ptr() % 16
        return value if str(parameter.annotation).startswith("Const") else type(value)


def test_bound_kernels_launch_the_same_code(monkeypatch: pytest.MonkeyPatch) -> None:
    launches = _Launches(monkeypatch)
    sizes = ((200, 60), (2, 1000), (1, 3000), (16, 64))
    problems = [MlaProblem(b=b, t=t, h=16) for b, t in sizes]
    first, *others = [FlashMlaPlan(pd, device=H200).prepare_inputs("cpu") for pd in problems]
    kernel = FlashMlaPlan(problems[0], device=H200).plan(*first)
    kernel()
    for inputs in others:
        kernel.bind(*inputs)()
    warm_up(first[0], s=1, h=16, width=512, dtype="bf16")
    assert len({key for fn, key, _ in launches.seen if fn is main_kernel}) == 1
    assert len({key for fn, key, _ in launches.seen if fn is combine}) == 1
    grids = [grid for fn, _, grid in launches.seen if fn is main_kernel]
    assert grids[0][1] == 1 < grids[1][1] and [g[2] for g in grids] == [b for b, _ in sizes]


# ---------------------------------------------------------------- choices
def test_refusals_say_why() -> None:
    problem = MlaProblem(h=16)
    for tiling, words in (
        (FlashMlaTiling(True, 8), "tile_m = 8: swapped it is 16."),
        (FlashMlaTiling(True, 32), "tile_m = 32: swapped it is 16."),
        (FlashMlaTiling(True, 64), "tile_m = 64: swapped it is 16."),
        (FlashMlaTiling(tile_m=128), "tile_m = 128: with heads on M it is 64."),
        (FlashMlaTiling(True, 16, 32), "tile_n = 32: swapped it is one of (64,)."),
        (FlashMlaTiling(tile_n=128), "tile_n = 128 does not divide a page of 64 tokens: a tile is in one page."),
        (FlashMlaTiling(tile_k=96), "tile_k = 96 is not one of 64, 128, 256, 512."),
        (FlashMlaTiling(num_splits=129), "num_splits = 129 is outside 0..128."),
    ):
        verdict = tiling.validate(problem, H200)
        assert not verdict and verdict.reason == words


def test_unsupported_problems_say_why() -> None:
    for options, words in (
        ({"page": 48}, "pages of 48 tokens: cuTile tiles are powers of two, use pages of 16, 32, 64, …"),
        ({"k": 256}, "written for latent 512 and rope 64; the problem has k = 256, p = 64."),
        ({"p": 32}, "written for latent 512 and rope 64; the problem has k = 512, p = 32."),
    ):
        verdict = FlashMlaPlan(MlaProblem(**options)).supported()
        assert not verdict and verdict.reason == words


@pytest.mark.parametrize("page", [16, 32, 64, 128])
@pytest.mark.parametrize("heads", [1, 3, 16, 32, 128])
def test_default_tilings_are_feasible(heads: int, page: int) -> None:
    for s in (1, 2, 70):
        plan = FlashMlaPlan(MlaProblem(h=heads, s=s, page=page), device=H200)
        assert plan.feasible()
        configs = plan.autotune_configs()
        assert configs[0] == plan.tiling and all(t.validate(plan.problem, H200) for t in configs)


def test_choose_splits() -> None:
    assert choose_splits(blocks=256, tiles=64, sms=132) == 1  # two waves without splitting
    assert choose_splits(blocks=1, tiles=1, sms=132) == 1  # nothing to split
    assert choose_splits(blocks=1, tiles=0, sms=132) == 1
    assert 32 <= choose_splits(blocks=2, tiles=1024, sms=132) <= 66  # one wave, filled
    assert choose_splits(blocks=1, tiles=100_000, sms=132) == 128  # the limit
    for blocks in (1, 5, 64, 131, 132, 133, 300):
        for tiles in (1, 2, 17, 512):
            assert 1 <= choose_splits(blocks, tiles, 132) <= min(tiles, 128)


# ---------------------------------------------------------------- on a GPU
@pytest.mark.gpu
@pytest.mark.parametrize("splits", [1, 5])
def test_a_graph_replays_over_changed_inputs(splits: int) -> None:
    from mla_var3.check.judge import compare
    from mla_var3.workload.decode import FLASHMLA

    problem = MlaProblem(b=3, t=900, h=16)
    plan = FlashMlaPlan(problem, FlashMlaTiling(True, 16, num_splits=splits))
    inputs = plan.prepare_inputs("cuda", seed=1)
    kernel = plan.plan(*inputs)
    kernel()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = kernel()
        kernel()
    inputs[0].copy_(plan.prepare_inputs("cuda", seed=2)[0])
    inputs[3].copy_(torch.tensor([0, 65, 900], dtype=torch.int32))
    for x in (out, lse, *kernel.workspace_tensors):
        x.fill_(float("nan"))
    for _ in range(20):
        graph.replay()
    torch.cuda.synchronize()
    report = compare(plan.workload, (out, lse), plan.reference_fn(*inputs), FLASHMLA)
    assert report.ok, report.reason


@pytest.mark.gpu
@pytest.mark.parametrize("heads", [16, 128])
def test_binding_compiles_nothing(heads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    from cuda.tile import _compile

    compiled: list[str] = []
    real = _compile.compile_tile

    def counting(function: Any, *rest: Any, **options: Any) -> Any:
        compiled.append(function.pyfunc.__name__)
        return real(function, *rest, **options)

    monkeypatch.setattr(_compile, "compile_tile", counting)
    # A class of its own (fp16, 3 query tokens): what other tests compiled does not count.
    sizes = {False: (200, 60), True: (2, 2000)}
    inputs = {}
    for split, (b, t) in sizes.items():
        plan = FlashMlaPlan(MlaProblem(b=b, t=t, s=3, h=heads, dtype="fp16"))
        assert (plan.num_splits(b, plan.problem.max_pages) > 1) == split
        inputs[split] = plan.prepare_inputs("cuda")
    kernel = FlashMlaPlan(MlaProblem(b=200, t=60, s=3, h=heads, dtype="fp16")).plan(*inputs[False])
    kernel()
    assert sorted(compiled) == ["combine", "flash_mla"]
    for split in (True, False, True):
        out, _ = kernel.bind(*inputs[split])()
        assert bool(torch.isfinite(out).all())
    assert len(compiled) == 2
