"""A whole layer: the oracle against a layer written head by head, its costs, and a check that tells right kernels from
wrong ones."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from mla_var3.check.judge import check
from mla_var3.device import Requirement
from mla_var3.errors import UserError
from mla_var3.kernel.layer import LayerTiling, compose
from mla_var3.runtime import KernelPlan
from mla_var3.workload import layer, problem_from_record
from mla_var3.workload.layer import CASES, WORKLOAD, LayerProblem

SMALL = LayerProblem(b=3, h=2, hidden=48, q_rank=32, k=24, p=8, d=16, page=4, lengths=(9, 1, 4))
TORCH = LayerTiling("torch/rmsnorm", "torch/rope_append", "torch/absorb_gemm", "torch/flash_mla")


# ---------------------------------------------------------------- inputs and oracle
def test_the_new_rows_are_nan_and_slots_are_where_the_page_table_has_them() -> None:
    for poison in (True, False):
        x = layer.named(layer.make_inputs(SMALL, seed=1, poison=poison))
        rows = x["kv_cache"].view(-1, 32)
        for i, length in enumerate(SMALL.attention.seq_lens):
            page = int(x["page_table"][i, (length - 1) // 4])
            slot = page * 4 + (length - 1) % 4
            assert int(x["slots"][i]) == slot and int(x["positions"][i]) == length - 1
            assert bool(rows[slot].isnan().all())
            for token in range(length - 1):
                assert bool(rows[int(x["page_table"][i, token // 4]) * 4 + token % 4].isfinite().all())
    assert len(rows) - int(rows.isnan().any(1).sum()) == len(rows) - 3, "without poison nothing else is NaN"


def test_the_oracle_is_the_decompressed_layer() -> None:
    """Keys and values of every head are made from the cached latent, as the absorbed form never does."""
    pd = SMALL
    x = layer.named(layer.make_inputs(pd, seed=2))
    out, row = layer.reference(pd, *x.values())
    full = {name: value.double() if value.is_floating_point() else value for name, value in x.items()}

    def normed(v: Any, weight: Any) -> Any:
        return v / (v.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt() * weight

    def turned(v: Any, position: int) -> Any:
        angles = position * 10000.0 ** (-torch.arange(0, pd.p, 2).double() / pd.p)
        pairs = torch.view_as_complex(v.reshape(*v.shape[:-1], -1, 2).contiguous())
        return torch.view_as_real(pairs * torch.polar(torch.ones_like(angles), angles)).flatten(-2)

    w = full["kv_up"].view(pd.h, 2, pd.d, pd.k)
    for i, length in enumerate(pd.attention.seq_lens):
        latents = full["down"] @ full["hidden"][i]
        query, latent, rope = latents.split([pd.q_rank, pd.k, pd.p])
        q = (full["up"] @ normed(query, full["q_norm"])).view(pd.h, -1)
        new = torch.cat([normed(latent, full["kv_norm"]), turned(rope, length - 1)])
        torch.testing.assert_close(row[i], new, atol=1e-6, rtol=1e-6)  # the table is in float32
        tokens = [
            full["kv_cache"].view(-1, pd.k + pd.p)[int(full["page_table"][i, t // 4]) * 4 + t % 4]
            for t in range(length - 1)
        ]
        cached = torch.stack([*tokens, new.bfloat16().double()])
        heads = []
        for head in range(pd.h):
            keys = torch.cat([cached[:, : pd.k] @ w[head, 0].t(), cached[:, pd.k :]], 1)
            values = cached[:, : pd.k] @ w[head, 1].t()
            mine = torch.cat([q[head, : pd.d], turned(q[head, pd.d :], length - 1)])
            heads.append((keys @ mine / math.sqrt(pd.d + pd.p)).softmax(0) @ values)
        torch.testing.assert_close(out[i], full["out"] @ torch.cat(heads), atol=1e-5, rtol=1e-5)


def test_what_it_costs_is_the_sum_of_its_parts() -> None:
    pd = LayerProblem(b=8, t=4096, h=128)
    weights = 7168 * 2112 + 1536 + 512 + 1536 * 128 * 192 + 128 * 256 * 512 + 7168 * 128 * 128
    cost = pd.cost()
    assert cost.bytes == 2 * (weights + 8 * (4096 * 576 + 2 * 7168 + 576))
    per_token = 2 * (weights - 1536 - 512)
    assert cost.flops == 8 * per_token + pd.attention.cost().flops
    assert pd.input_bytes() > cost.bytes


@pytest.mark.parametrize(
    ("fields", "word"), [({"p": 7}, "odd"), ({"hidden": 0}, "hidden"), ({"t": -1}, "t"), ({"dtype": "int8"}, "dtype")]
)
def test_problems_that_make_no_sense_are_refused(fields: dict[str, Any], word: str) -> None:
    with pytest.raises(UserError, match=word):
        LayerProblem(**fields)


def test_records_bring_a_problem_back() -> None:
    for pd in (LayerProblem(b=8, h=16), SMALL, LayerProblem(b=4, lengths="ragged")):
        assert problem_from_record(pd.to_record()) == pd


def test_other_requests_bind_and_other_weights_do_not() -> None:
    inputs = layer.make_inputs(SMALL.replace(b=2, lengths=(5, 2)), seed=3)
    assert layer.rebound(SMALL, *inputs).b == 2
    for name in ("up", "slots", "kv_cache"):
        wrong = [
            value[:, :-1] if key == name and value.dim() > 1 else value for key, value in layer.named(inputs).items()
        ]
        wrong = [
            value.int() if key == name and value.dim() == 1 else value
            for key, value in zip(layer.NAMES, wrong, strict=True)
        ]
        with pytest.raises(UserError, match=f"cannot bind: {name} is"):
            layer.rebound(SMALL, *wrong)


# ---------------------------------------------------------------- right and wrong
def plan_of(break_: Callable[[str, Any], None] | None = None) -> type[KernelPlan]:
    """Plan of the layer from torch's versions; `break_` is given each stage's name and its outputs after it ran."""

    class Plan(KernelPlan):
        workload = WORKLOAD
        tiling_type = LayerTiling
        requires = Requirement(archs=())
        parts = ("torch/rmsnorm", "torch/rope_append", "torch/absorb_gemm", "torch/flash_mla")

        def default_tiling(self) -> LayerTiling:
            return TORCH

        def autotune_configs(self) -> list[Any]:
            return []

        def plan(self, *inputs: Any) -> Any:
            kernel = compose(self, inputs)
            for stage in kernel.stages if break_ is not None else ():
                launch = stage.launch

                def broken(stage: Any = stage, launch: Any = launch) -> None:
                    launch()
                    break_(stage.name, stage.output_tensors)

                stage.launch = broken
            return kernel

        def plan_empty(self) -> Any:
            return compose(self)

    return Plan


def test_a_pipeline_of_kernels_passes_every_case() -> None:
    report = check(plan_of(), SMALL, device="cpu")
    assert report.ok, report.reason
    assert [case.name for case in report.cases] == list(CASES)


def nothing_rotated(name: str, outputs: Any) -> None:
    if name == "rope_append":
        outputs[0][..., 24:] = 0.0


def a_row_beside_the_new_one(name: str, outputs: Any) -> None:
    if name == "rope_append":
        rows = outputs[1].view(-1, 32)
        rows[(~rows.isnan().any(1)).nonzero()[0]] += 1.0


def no_row(name: str, outputs: Any) -> None:
    if name == "rope_append":
        outputs[1][:] = 0.0


def no_latent_norm(name: str, outputs: Any) -> None:
    if name == "rmsnorm":
        outputs[1].mul_(1.05)


def heads_in_another_order(name: str, outputs: Any) -> None:
    if name == "flash_mla":
        outputs[0].copy_(outputs[0].flip(2).clone())


def an_idle_request_gets_something(name: str, outputs: Any) -> None:
    if name == "flash_mla":
        outputs[0][(outputs[1] == float("inf")).all(-1).all(-1)] = 1e-3


@pytest.mark.parametrize(
    ("wrong", "case"),
    [
        (nothing_rotated, "ragged"),
        (a_row_beside_the_new_one, "own"),
        (no_row, "first_tokens"),
        (no_latent_norm, "own"),
        (heads_in_another_order, "own"),
        (an_idle_request_gets_something, "idle"),
    ],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_wrong_kernels_fail(wrong: Any, case: str) -> None:
    report = check(plan_of(wrong), SMALL, device="cpu", cases=[case])
    assert not report.ok and case in report.reason
