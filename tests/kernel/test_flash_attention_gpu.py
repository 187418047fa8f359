"""CuTe's flash_attention on a GPU: right for every width in every case of the check, the same bits in every call."""

from __future__ import annotations

import pytest
from planning import planned, right, writes_the_same_bits

from mla_var3.catalogue import registry
from mla_var3.workload.prefill import PrefillProblem

pytestmark = pytest.mark.gpu

KERNELS = [k for k in registry.all_kernels() if k.language == "cute-dsl" and k.design == "flash_attention"]
#: (d, p) of published models.
WIDTHS = ((128, 64), (128, 0), (256, 0), (128, 128), (64, 32))
each_version = pytest.mark.parametrize("kernel", KERNELS, ids=lambda k: k.label)


@each_version
@pytest.mark.parametrize(
    ("d", "p", "causal"), [(d, p, True) for d, p in WIDTHS] + [(128, 64, False), (128, 128, False)]
)
def test_right_on_the_cases_that_break_kernels(kernel: registry.KernelId, d: int, p: int, causal: bool) -> None:
    problem = PrefillProblem(b=2, s=1000, t=1300, h=8, d=d, p=p, causal=causal)
    assert len(right(planned(kernel, problem))) >= 10


@each_version
def test_right_in_half_precision_with_few_heads_and_in_turn(kernel: registry.KernelId) -> None:
    problem = PrefillProblem(b=2, s=1000, h=8, h_kv=2, causal=True, dtype="fp16")
    right(planned(kernel, problem, ordered=True))


@each_version
def test_rows_that_see_one_key_of_their_first_kv_tile_are_as_exact_as_others(kernel: registry.KernelId) -> None:
    """KV tiles of 256/256 have 80 keys, so that query token 80 i sees one of the first. Were the maximum to stay at
    that key's score, these rows would be off by 1.2 times as much as others (squared: 1.44)."""
    plan = planned(kernel, PrefillProblem(s=4096, h=16, d=256, p=0, causal=True))
    inputs = plan.prepare_inputs("cuda", seed=1, dist="flashmla")
    out, want = plan.plan(*inputs)()[0].double(), plan.reference_fn(*inputs)[0]
    error = (out - want).square().sum(-1) / want.square().sum(-1)
    assert float(error[1040::80].mean()) < 1.15 * float(error[1040:].mean())


@each_version
def test_the_same_bits_in_every_call(kernel: registry.KernelId) -> None:
    """Query tiles go to whichever CTA asks first, and hundreds of requests of no and few tokens follow each other in
    one: a stage or a query tile that is overwritten too early would show."""
    pairs = [((7 * i) % 150, (11 * i) % 260) for i in range(300)]
    plan = planned(kernel, PrefillProblem(b=len(pairs), h=8, causal=True, lengths=pairs))
    writes_the_same_bits(plan.plan(*plan.prepare_inputs("cuda", seed=1, dist="normal")))


#: Requests with rests of query tokens on both sides of half a query tile, without keys, and with fewer keys than
#: queries; the last one has more splits than KV tiles.
SPLIT = [(1, 1), (128, 4000), (129, 129), (300, 9000), (0, 40), (257, 2000), (640, 300), (5, 5000), (200, 0), (70, 90)]


@pytest.mark.parametrize("splits", [0, 2, 3, 8])
@pytest.mark.parametrize("causal", [True, False])
def test_keys_in_splits(causal: bool, splits: int) -> None:
    """By version 23's choice, and more of them."""
    kernel = registry.KernelId.parse("cute-dsl/flash_attention_v23")
    plan = planned(kernel, PrefillProblem(b=len(SPLIT), h=2, causal=causal, lengths=SPLIT), splits=splits)
    right(plan)
    writes_the_same_bits(plan.plan(*plan.prepare_inputs("cuda", seed=1, dist="normal")))
    right(planned(kernel, PrefillProblem(b=1, s=384, t=5000, h=16, causal=causal), splits=splits))
