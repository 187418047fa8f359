"""packed_append on a GPU: right on the cases that break kernels, the bytes that `pack` makes, capturable."""

from __future__ import annotations

import pytest
from planning import planned, right

from mla_var3.catalogue import registry
from mla_var3.packed_cache import fields, new_cache, pack, unpack
from mla_var3.workload.packed_append import PackedAppendProblem, reference, views
from running import captured

pytestmark = pytest.mark.gpu

KERNELS = [k for k in registry.all_kernels() if k.design == "packed_append"]
OURS = [k for k in KERNELS if k.language not in ("peer", "torch")]
PROBLEMS = [
    PackedAppendProblem(tokens=300, h=128),
    PackedAppendProblem(tokens=300, h=16, powers=False, interleaved=False, page=1),
    PackedAppendProblem(tokens=300, h=64, layout="v4", columns=512, index="int32", page=48),
    PackedAppendProblem(tokens=300, h=20, layout="flat", interleaved=False),
    PackedAppendProblem(tokens=300, h=64, layout="v41", columns=512, page=48),
    PackedAppendProblem(tokens=300, h=64, layout="v41_fp4", columns=512, interleaved=False),
    PackedAppendProblem(tokens=300, h=20, layout="v41_planar", columns=512, interleaved=False, page=5),
    PackedAppendProblem(tokens=300, h=16, layout="v41_fp4_planar", columns=512, page=256),
    PackedAppendProblem(tokens=300, layout="v32_no_rope", page=5),
    PackedAppendProblem(tokens=300, layout="v32_no_rope", powers=False, index="int32", rest=0),
    PackedAppendProblem(tokens=300, layout="flat_no_rope", page=1),
]
#: Cases of the check.
COUNTS = {"v32": 18, "v32_no_rope": 15, "flat_no_rope": 14}

FAR = PackedAppendProblem(tokens=100)


@pytest.mark.parametrize("problem", PROBLEMS, ids=lambda p: p.label)
@pytest.mark.parametrize("kernel", KERNELS, ids=lambda k: k.label)
def test_right_on_the_cases_that_break_kernels(kernel: registry.KernelId, problem: PackedAppendProblem) -> None:
    assert len(right(planned(kernel, problem))) == COUNTS.get(problem.layout, 17)


@pytest.mark.parametrize("problem", PROBLEMS, ids=lambda p: p.label)
def test_every_cute_tiling_is_right(problem: PackedAppendProblem) -> None:
    plan = planned("cute-dsl/packed_append", problem)
    for tiling in plan.autotune_configs():
        right(plan.with_tiling(tiling), ["own", "one_token", "uneven", "skipped"])


@pytest.mark.parametrize("problem", PROBLEMS, ids=lambda p: p.label)
@pytest.mark.parametrize("kernel", OURS, ids=lambda k: k.label)
def test_a_replayed_call_packs_what_pack_does_and_leaves_the_rest(
    kernel: registry.KernelId, problem: PackedAppendProblem
) -> None:
    """Byte for byte, v4's unread ones too; the rope columns are taken from the cache itself."""
    import torch

    plan = planned(kernel, problem)
    inputs = plan.prepare_inputs("cuda", seed=1)
    bound = plan.plan(*inputs)
    graph, _ = captured(bound)
    for old, new in zip(inputs, plan.prepare_inputs("cuda", seed=2, dist="skipped"), strict=True):
        old.copy_(new)
    layout, codes = problem.cache, bound.output_tensors[1]
    cache = codes.as_strided((*codes.shape[:2], layout.token_bytes), (codes.stride(0), layout.token_bytes, 1))
    memory = cache.as_strided((codes.shape[0] * codes.stride(0),), (1,))
    memory.fill_(0xA5)
    graph.replay()
    torch.cuda.synchronize()
    latent, slots = inputs[:2] if problem.no_rope else (inputs[1], inputs[4])
    slots = slots.long()
    at = (slots[slots >= 0] // problem.page, slots[slots >= 0] % problem.page)
    if problem.v41:  # what is unpacked and packed again may have other scales; turns by quarters are exact
        wanted = torch.full_like(memory, 0xA5)
        parts = views(layout, wanted.as_strided(cache.shape, cache.stride()))
        for to, right in zip(parts, reference(problem, *inputs)[1:], strict=True):
            to[~right.isnan()] = right[~right.isnan()].to(to.dtype)
        assert torch.equal(memory, wanted)
        return
    scale = inputs[-1] if layout.one_scale else None
    rope = unpack(layout, cache, scale)[at][:, problem.k :]
    tokens = torch.cat([latent[slots >= 0].double(), rope], dim=1).bfloat16()
    if problem.layout == "flat":  # unpacked and packed again, its rope columns are what they were
        tokens = torch.cat([latent[slots >= 0].float(), rope.float()], dim=1)
    wanted = torch.full_like(memory, 0xA5)
    into = wanted.as_strided(cache.shape, cache.stride())
    alone = pack(layout, tokens.unsqueeze(1), scale=scale, powers=problem.powers)
    for to, given in zip(views(layout, into), views(layout, alone), strict=True):
        to[at] = given[:, 0]
    assert torch.equal(memory, wanted)


def test_pages_beyond_2_31_bytes() -> None:
    """The last page begins 2.1e9 bytes behind the first one; only what belongs to it is touched."""
    import torch

    problem = FAR
    plan = planned("cute-dsl/packed_append", problem)
    inputs = list(plan.prepare_inputs("cuda", seed=1))
    layout, apart = problem.cache, (1 << 30) + 64 * 656
    try:
        memory = torch.empty(2 * apart + 64 * 656, dtype=torch.uint8, device="cuda")
    except torch.OutOfMemoryError:
        pytest.skip("2.1 GB of device memory are not free")
    cache = memory.as_strided((3, 64, 656), (apart, 656, 1))
    cache.fill_(0xA5)
    inputs[4] = torch.randperm(3 * 64, device="cuda")[:100]
    out = inputs[0].new_empty((100, problem.h, 576))
    plan.plan_into(inputs, (out, *views(layout, cache)))()
    torch.cuda.synchronize()
    near = new_cache(layout, 3, 64, "cuda").fill_(0xA5)
    plan.plan_into(inputs, (out, *views(layout, near)))()
    torch.cuda.synchronize()
    assert torch.equal(cache, near)
    at = (inputs[4] // 64, inputs[4] % 64)
    codes = fields(layout, near).codes
    alone = pack(layout, torch.cat([inputs[1], inputs[2]], dim=1).unsqueeze(1))
    assert codes is not None and torch.equal(codes[at], views(layout, alone)[0][:, 0])
