"""The fixed-split mode without a GPU: which version it takes, with which knobs, and that no batch changes that."""

from __future__ import annotations

from typing import Any

import pytest

from mla_var3.catalogue import registry
from mla_var3.device import Device
from mla_var3.errors import Unsupported, UserError
from mla_var3.ops import fixed
from mla_var3.ops.fixed import fixed_choice
from mla_var3.ops.ways import way_for
from mla_var3.workload.decode import MlaProblem
from mla_var3.workload.sparse_decode import SparseProblem

H200 = Device.get("h200")
BATCHES = ((1, 64), (2, 131072), (256, 700), (64, 8192))


@pytest.fixture
def only(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """Leaves the versions of some languages alone in the registry."""
    some = tuple(k for k in registry.all_kernels() if k.language in request.param)
    monkeypatch.setattr(registry, "all_kernels", lambda: some)
    fixed._choice.cache_clear()
    yield
    fixed._choice.cache_clear()


@pytest.mark.parametrize(("fields", "version"), [({"h": 8}, 24), ({"h": 32}, 24), ({"h": 16, "s": 4}, 23), ({}, 23)])
def test_the_version_follows_from_the_class_alone(fields: dict[str, int], version: int) -> None:
    pytest.importorskip("cutlass", reason="nvidia-cutlass-dsl is not installed")
    ways = {way_for(MlaProblem(b=b, t=t, **fields), H200, fixed_split=2048).key for b, t in BATCHES}
    ((kernel, tiling),) = ways
    assert kernel.label == f"cute-dsl/flash_mla_v{version}"
    assert dict(tiling)["split_tokens"] == 2048


@pytest.mark.parametrize("fields", [{"h": 8}, {"h": 128}, {"h": 16, "s": 4, "causal": True}, {"h": 16, "page": 128}])
def test_the_knobs_of_a_version_follow_from_the_class_alone(fields: dict[str, int]) -> None:
    """The mode fixes one knob and leaves the others at their default: that must not look at the batch."""
    for kernel in registry.all_kernels():
        if registry.missing(kernel) or kernel.language in ("torch", "peer"):
            continue
        plan_type = registry.get_plan(kernel)
        plans = [plan_type(MlaProblem(b=b, t=t, **fields), None, H200) for b, t in BATCHES]
        if not plans[0].supported() or not {"split_tokens", "num_splits"} & set(plans[0].tiling.to_record()):
            continue
        assert len({plan.tiling for plan in plans}) == 1, kernel.label


def test_only_versions_that_split_by_a_requests_length_are_taken() -> None:
    problem = MlaProblem(b=132, h=16, t=4096)
    for kernel in registry.all_kernels():
        if registry.missing(kernel) or kernel.language in ("torch", "peer"):
            continue
        plan_type = registry.get_plan(kernel)
        plan = plan_type(problem, None, H200)
        if not plan.supported():
            continue
        knobs = plan.tiling.to_record()
        by_length, whole = fixed.splits_by_length(plan_type, plan, 4096), fixed.leaves_whole(plan_type, plan)
        assert bool(by_length) == ("split_tokens" in knobs), (kernel.label, by_length.reason)
        # mla_var6_plus has the knob too, and a second stage whatever it says.
        assert bool(whole) == ("num_splits" in knobs and kernel.design == "flash_mla"), (kernel.label, whole.reason)


@pytest.mark.parametrize("only", [("triton",)], indirect=True)
def test_where_no_version_has_the_knob_requests_stay_whole(only: None) -> None:
    pytest.importorskip("triton")
    choice = fixed_choice(MlaProblem(h=16), 1024, Device.get("a100"))
    assert choice.kernel.label == "triton/flash_mla" and choice.knobs == {"num_splits": 1}
    for b, t in BATCHES:
        made = choice.plan(MlaProblem(b=b, h=16, t=t), Device.get("a100")).plan_empty()
        assert not hasattr(made, "stages")


@pytest.mark.parametrize("only", [("cute-dsl",)], indirect=True)
def test_a_device_without_a_version_is_unsupported(only: None) -> None:
    with pytest.raises(Unsupported, match="no version takes"):
        fixed_choice(MlaProblem(h=3, k=384), 4096, Device.get("a100"))


#: Classes of sparse decode and of dense decode over packed caches; the last one has no version with the knob.
SPARSE: list[dict[str, Any]] = [
    {"h": 128},
    {"h": 96, "s": 2, "sink": True},
    {"h": 12, "s": 3, "lengths": True},
    {"h": 16, "layout": "flat"},
    {"h": 64, "s": 2, "layout": "v4", "extra": 512, "sink": True, "extra_lengths": True},
    {"h": 40, "s": 4, "paged": True},
    {"h": 8, "layout": "v4", "paged": True},
    {"h": 16, "layout": "bf16"},
]


@pytest.mark.parametrize("fields", SPARSE, ids=lambda f: SparseProblem(**f).problem_class().key())
def test_sparse_decode_takes_a_version_by_its_class(fields: dict[str, Any]) -> None:
    """Free splits have query tiles of other heads where there are few requests, and the mode may not."""
    pytest.importorskip("cutlass", reason="nvidia-cutlass-dsl is not installed")
    of_bf16, plans = fields.get("layout") == "bf16", []
    for b, tokens in BATCHES:
        sizes = {} if fields.get("paged") else {"topk": min(tokens, 2048)}
        problem = SparseProblem(b=b, t=tokens, **sizes, **fields)
        way = way_for(problem, H200, fixed_split=512)
        plans.append(way.make(problem, H200))
        assert plans[-1].feasible() and not hasattr(plans[-1].plan_empty(), "stages")
        assert way.key[0].label == ("triton/sparse_mla" if of_bf16 else "cute-dsl/sparse_mla_v2")
    assert len({plan.tiling for plan in plans}) == 1
    tiling = plans[0].tiling.to_record()
    assert tiling["num_splits" if of_bf16 else "split_tokens"] == (1 if of_bf16 else 512)
    if not of_bf16:
        assert plans[0].tiling.geometry(plans[0].problem) == plans[-1].tiling.geometry(plans[-1].problem)


def test_query_tiles_of_fixed_splits_are_those_of_a_full_chip() -> None:
    """However short the splits are: 8 tiles of 16 heads would read each token 8 times."""
    pytest.importorskip("cutlass", reason="nvidia-cutlass-dsl is not installed")
    for tokens in (64, 4096):
        choice = fixed_choice(SparseProblem(b=1, h=128, topk=64), tokens, H200)
        # Code that looks for the ends of rows, as a full chip has it: with fixed splits it looks for none when it runs.
        assert choice.knobs == {"heads": 0, "workers": 0, "split_tokens": tokens, "shortens": True}


def test_a_version_and_a_fixed_split_are_refused_together() -> None:
    with pytest.raises(UserError, match="fixed_split chooses its own version: give it, or kernel, not both"):
        way_for(SparseProblem(), H200, fixed_split=64, kernel="cute-dsl/sparse_mla_v2")


@pytest.mark.parametrize("tokens", [0, 100, -64, True, 64.0, "64"])
def test_a_length_that_is_no_number_of_kv_tiles_is_refused(tokens: object) -> None:
    with pytest.raises(UserError, match="is not a whole number of KV tiles: give a multiple of 64 tokens"):
        fixed_choice(MlaProblem(), tokens, H200)  # type: ignore[arg-type]
