"""Strided calls on a GPU: the bits of the contiguous call, no kernel but ours, and nothing written between rows."""

from __future__ import annotations

import random
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from ops_gpu import compile_ahead  # noqa: E402
from public_calls import attend, touched  # noqa: E402

from mla_var3.ops import flash_mla  # noqa: E402
from mla_var3.workload import decode, sparse_decode  # noqa: E402
from mla_var3.workload.decode import MlaProblem, apart  # noqa: E402
from mla_var3.workload.sparse_decode import SparseProblem  # noqa: E402
from running import captured  # noqa: E402

pytestmark = pytest.mark.gpu

#: Both versions that are picked, whole requests and cut ones, few query rows and many; packed queries, a tree, gathered
#: rows of pages.
DENSE = [
    MlaProblem(b=3, h=128, t=1, lengths=[700, 0, 9000]),
    MlaProblem(b=150, h=128, t=130),
    MlaProblem(b=3, h=16, t=1, lengths=[700, 0, 20000]),
    MlaProblem(b=140, h=16, t=70),
    MlaProblem(b=5, s=2, h=128, causal=True, t=1, lengths=[700, 65, 4097, 1, 64]),
    MlaProblem(b=4, h=16, causal=True, t=1, lengths=[300, 65, 20, 9000], queries=[1, 7, 0, 4]),
    MlaProblem(b=4, h=128, causal=True, t=1, lengths=[300, 65, 20, 9000], queries=[1, 70, 0, 4]),
    MlaProblem(b=2, h=16, s=4, t=1, lengths=[300, 5000], tree=True),
    MlaProblem(b=3, h=16, t=1, lengths=[700, 0, 9000], page=1),
    MlaProblem(b=3, s=2, h=64, t=1, lengths=[700, 0, 9000], k=384),
    MlaProblem(b=150, h=16, t=130, k=128),
]
PACKED = [
    SparseProblem(b=8, s=2, h=64, t=4096, layout="bf16", topk=512),
    SparseProblem(b=1, s=2, h=64, t=4096, layout="bf16", topk=2048),
    SparseProblem(b=8, s=2, h=64, t=4096),
    SparseProblem(b=2, s=2, h=64, t=4096),
    SparseProblem(b=200, h=16, t=512, layout="v4", topk=128, extra=512, extra_page=64, sink=True),
    SparseProblem(b=3, h=16, t=9000, paged=True),
    SparseProblem(b=5, s=3, h=12, t=2000, topk=700),  # heads that do not fill their query tiles
    SparseProblem(b=5, s=2, h=64, t=2000, layout="v41", topk=300, extra=200, extra_layout="v41_fp4", extra_page=16),
    SparseProblem(b=9, h=16, t=2000, topk=700, layout="flat"),
    SparseProblem(b=9, h=64, t=2000, topk=700, layout="v32_no_rope"),
]
PROBLEMS: list[Any] = [*DENSE, *PACKED]
BOTH = {"strided": True, "strided_out": True}


@pytest.fixture(scope="module", autouse=True)
def compiled() -> None:
    """Of each class the contiguous call and those that this file makes."""
    wanted = [p.replace(**flags) for p in DENSE for flags in ({}, BOTH)]
    wanted += [p.replace(**{name: True}) for p in DENSE[0::2][:2] for name in BOTH]
    over: list[Any] = [p.replace(**flags) for p in PACKED[:1] for flags in ({}, BOTH, {"strided": True})]
    over += [p.replace(**flags) for p in PACKED[2:] for flags in ({}, {"strided_out": True})]
    compile_ahead([*wanted, *over])


def call(problem: Any, inputs: tuple[Any, ...], **options: Any) -> Any:
    return attend(problem, inputs, **{"scale": 0.05, **options})


def made(problem: Any, seed: int = 0) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """The same inputs, contiguous and strided, the latter around NaN; a tree's mask as `mla_decode` takes it."""
    make = decode.make_inputs if isinstance(problem, MlaProblem) else sparse_decode.make_inputs
    both = make(problem, "cuda", seed=seed), make(problem.replace(strided=True), "cuda", seed=seed)
    if isinstance(problem, MlaProblem) and problem.tree:
        both = (*both[0][:4], both[0][4].bool()), (*both[1][:4], both[1][4].bool())
    return both


def views(problem: Any, q: Any) -> tuple[Any, Any]:
    """out and lse between elements that are 7."""
    workload = decode if isinstance(problem, MlaProblem) else sparse_decode
    out, lse = (torch.zeros_like(x) for x in workload.new_outputs(problem, q))
    return apart(out, 7.0), apart(lse.unsqueeze(-1), 7.0, 1)[..., 0]


def differs(found: Any, wanted: Any, what: str) -> str:
    """Empty where bits are the same, else what differs and where it begins."""
    lines = []
    for name, a, b in zip(("out", "lse"), found, wanted, strict=True):
        ints = {2: torch.int16, 4: torch.int32}[a.element_size()]
        off = a.contiguous().view(ints) != b.contiguous().view(ints)
        if bool(off.any()):
            at = off.nonzero()
            error = float((a.float() - b.float()).nan_to_num(nan=1e9, posinf=1e9).abs().max())
            lines.append(
                f"{what}: {name} differs in {len(at)} of {off.numel()} elements, first {at[0].tolist()}, last "
                f"{at[-1].tolist()}, by up to {error}, NaN {int(a.isnan().sum())} where {int(b.isnan().sum())}"
            )
    return "; ".join(lines)


def names_of(problem: Any) -> tuple[str, ...]:
    return ("flash_mla", "combine", "make_schedule") if isinstance(problem, MlaProblem) else ("sparse_mla", "combine")


@pytest.mark.parametrize("problem", PROBLEMS, ids=lambda p: p.problem_class().key() + f"_b{p.b}")
def test_a_strided_call_gives_the_bits_of_a_contiguous_one(problem: Any) -> None:
    plain, strided = made(problem)
    wanted = call(problem, plain)
    assert not wanted[0].isnan().any()
    found = views(problem, strided[0])
    call(problem, strided, out=found[0], lse=found[1])
    assert not differs(found, wanted, "all strided")
    assert [touched(x, 7.0) for x in found] == [0, 0], "elements between rows were written"
    if problem in (DENSE[0], DENSE[2], PACKED[0], *PACKED[2:]):
        assert not differs(call(problem, strided), wanted, "inputs strided")
    if problem in (DENSE[0], DENSE[2], *PACKED[2:]):
        found = views(problem, plain[0])
        call(problem, plain, out=found[0], lse=found[1])
        assert not differs(found, wanted, "results strided")
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        call(problem, strided, out=found[0], lse=found[1])
        torch.cuda.synchronize()
    seen = {event.name for event in profile.events() if event.device_type == torch.profiler.DeviceType.CUDA}
    assert seen and all(any(own in name for own in names_of(problem)) for name in seen), seen


def turned(x: Any, order: list[int], step: int) -> Any:
    """The same values, with dimensions in another order in memory and rows up to a few steps further apart."""
    room = apart(x.permute(*order, x.dim() - 1).contiguous(), 7.0 if x.is_floating_point() else 0, step)
    return room.permute(*[order.index(i) for i in range(x.dim() - 1)], x.dim() - 1)


@pytest.mark.parametrize(
    "problem", [DENSE[0], DENSE[2], DENSE[4], DENSE[5], PACKED[0], PACKED[2]], ids=lambda p: p.label
)
def test_any_order_of_request_token_and_head(problem: Any) -> None:
    rng, (plain, _) = random.Random(3), made(problem, seed=1)
    wanted = call(problem, plain)
    for _ in range(6):
        given = list(plain)
        for i in (0, 2):
            order = list(range(plain[i].dim() - 1))
            rng.shuffle(order)
            given[i] = turned(plain[i], order, rng.choice((0, 8, 72)) if i == 0 else rng.choice((0, 1, 5)))
        order = list(range(wanted[0].dim() - 1))
        rng.shuffle(order)
        out = turned(torch.full_like(wanted[0], 7.0), order, rng.choice((8, 16, 520)))
        lse = torch.full_like(wanted[1].movedim(0, -1).contiguous(), 7.0).movedim(-1, 0)
        call(problem, tuple(given), out=out, lse=lse)
        strides = [given[0].stride(), given[2].stride(), out.stride(), lse.stride()]
        assert not differs((out, lse), wanted, str(strides))
        assert touched(out, 7.0) == 0, strides


@pytest.mark.parametrize("problem", [DENSE[0], DENSE[2], PACKED[2]], ids=lambda p: p.label)
def test_a_compiled_function_and_a_graph_read_and_write_strides(problem: Any) -> None:
    plain, strided = made(problem)
    wanted = call(problem, plain)
    found = views(problem, strided[0])
    torch._dynamo.reset()
    step = torch.compile(lambda out, lse, *given: call(problem, given, out=out, lse=lse)[0] + 1, fullgraph=True)
    more = step(*found, *strided)
    assert torch.equal(more, wanted[0] + 1) and not differs(found, wanted, "compiled")
    assert [touched(x, 7.0) for x in found] == [0, 0]
    for x in found:
        x.zero_()
    graph, _ = captured(lambda: call(problem, strided, out=found[0], lse=found[1]))
    for seed in (1, 2):
        plain, again = made(problem, seed)
        for old, new in zip(strided, again, strict=True):
            old.copy_(new)
        graph.replay()
        torch.cuda.synchronize()
        assert not differs(found, call(problem, plain), f"replayed, seed {seed}")
        assert [touched(x, 7.0) for x in found] == [0, 0]


def test_flash_mlas_names_write_into_the_callers_views() -> None:
    problem = DENSE[0]
    plain, strided = made(problem)
    wanted = flash_mla.flash_mla_with_kvcache(*plain, 512, flash_mla.get_mla_metadata()[0])
    found = views(problem, strided[0])
    out, lse = flash_mla.flash_mla_with_kvcache(
        *strided, 512, flash_mla.get_mla_metadata()[0], out=found[0], lse=found[1]
    )
    assert out is found[0] and lse is found[1] and not differs(found, wanted, "FlashMLA's names")
    assert [touched(x, 7.0) for x in found] == [0, 0]


@pytest.mark.parametrize("problem", [DENSE[0], DENSE[2], PACKED[2], PACKED[5]], ids=lambda p: p.label)
def test_a_scale_below_zero_and_splits_of_a_fixed_length(problem: Any) -> None:
    plain, strided = made(problem)
    for options in ({"scale": -0.05}, {"fixed_split": 1024}):
        wanted, found = call(problem, plain, **options), views(problem, strided[0])
        call(problem, strided, out=found[0], lse=found[1], **options)
        assert not differs(found, wanted, str(options))
        assert [touched(x, 7.0) for x in found] == [0, 0]
