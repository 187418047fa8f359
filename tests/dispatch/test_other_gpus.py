"""What GPUs get that are not Hopper, and that `devices.json` has no entry for: their limits are the driver's."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from mla_var3.device import Device, _from_properties
from mla_var3.errors import UserError
from mla_var3.ops.ways import way_for
from mla_var3.workload import Problem
from mla_var3.workload.decode import MlaProblem
from mla_var3.workload.prefill import PrefillProblem
from mla_var3.workload.sparse_decode import SparseProblem


def gpu(name: str, major: int, minor: int, sms: int, smem: int) -> Device:
    """smem: bytes of shared memory that a CTA may have."""
    return _from_properties(
        SimpleNamespace(
            name=name, major=major, minor=minor, multi_processor_count=sms, shared_memory_per_block_optin=smem,
            shared_memory_per_multiprocessor=smem + 1024, max_threads_per_multi_processor=1536, L2_cache_size=6 << 20,
            total_memory=24 << 30,
        )
    )  # fmt: skip


OTHERS = {
    "RTX 3090": gpu("NVIDIA GeForce RTX 3090", 8, 6, 82, 101376),
    "L4": gpu("NVIDIA L4", 8, 9, 58, 101376),
    "Orin": gpu("Orin", 8, 7, 16, 166912),
    "GB10": gpu("NVIDIA GB10", 12, 1, 48, 101376),
}
TURING = gpu("Tesla T4", 7, 5, 40, 65536)
FEW: dict[str, Any] = {"b": 4, "h": 16, "t": 1000}
MANY: dict[str, Any] = {**FEW, "h": 128}
PROMPT: dict[str, Any] = {"b": 1, "s": 512, "h": 16, "t": 512, "causal": True}


def picked(problem: Problem, device: Device) -> str:
    way = way_for(problem, device)
    way.make(problem, device).require()  # type: ignore[union-attr]
    return str(getattr(way.key[0], "label", way.key[0]))


@pytest.mark.parametrize("name", OTHERS)
def test_a_gpu_that_has_no_entry_gets_the_kernels_of_single_warps(name: str) -> None:
    device = OTHERS[name]
    assert not device.known
    decode, sparse = "cute-dsl/flash_mla_mma_v1", "cute-dsl/sparse_mla_mma"
    fields: dict[str, Any]
    for fields in ({}, {"k": 256}, {"k": 128}, {"k": 512, "p": 0}, {"dtype": "fp16", "page": 5}, {"page": 1}):
        assert picked(MlaProblem(**FEW, **fields), device) == decode
    many = ("cute-dsl/flash_mla_mma_v3",) * 2 if name != "GB10" else ("triton/flash_mla", decode)
    assert (picked(MlaProblem(**MANY), device), picked(MlaProblem(**MANY, queries={"total": 9}), device)) == many
    for layout in ("v32", "flat", "bf16", "v32_no_rope"):
        assert picked(SparseProblem(**FEW, topk=64, layout=layout), device) == sparse
    assert picked(SparseProblem(**FEW, paged=True, layout="flat"), device) == sparse
    for fields in ({}, {"p": 0}, {"dtype": "fp16"}):
        assert picked(PrefillProblem(**PROMPT, **fields), device) == "cute-dsl/flash_attention_mma"


@pytest.mark.parametrize("name", OTHERS)
@pytest.mark.parametrize(
    ("problem", "said"),
    [
        (MlaProblem(**FEW, dtype="fp32"), "the kernel takes bf16 or fp16; the problem is fp32"),
        (MlaProblem(**FEW, k=384), "k = 384 must be 128, 256 or 512"),
        (MlaProblem(**FEW, p=24), "the rope part of p = 24 columns must be a multiple of 16"),
    ],
)
def test_what_no_version_takes_there_is_refused_with_the_reason(name: str, problem: Problem, said: str) -> None:
    with pytest.raises(UserError, match="no version takes") as caught:
        way_for(problem, OTHERS[name])
    assert f"cute-dsl/flash_mla_mma_v1: {said}" in str(caught.value)


def test_layouts_of_v4_need_a_gpu_that_converts_e4m3() -> None:
    problem = SparseProblem(**FEW, topk=64, layout="v4")
    assert picked(problem, OTHERS["L4"]) == "triton/sparse_mla"
    with pytest.raises(UserError, match="triton/sparse_mla: the kernel is written for sm_89 or later; this is sm_86"):
        way_for(problem, OTHERS["RTX 3090"])


@pytest.mark.parametrize(
    ("problem", "label"),
    [
        (MlaProblem(**FEW), "flash_mla_mma_v1"),
        (SparseProblem(**FEW, topk=64, layout="v32"), "sparse_mla_mma"),
        (PrefillProblem(**PROMPT), "flash_attention_mma"),
    ],
)
def test_a_gpu_older_than_ampere_is_refused(problem: Problem, label: str) -> None:
    with pytest.raises(UserError, match="no version takes"):
        way_for(problem, TURING)
    named = way_for(problem, TURING, kernel=f"cute-dsl/{label}").make(problem, TURING)
    with pytest.raises(UserError, match="cp_async needs sm_80 or later; this is sm_75"):
        named.require()  # type: ignore[union-attr]


def test_a_name_without_an_entry_is_told_what_to_name_instead() -> None:
    with pytest.raises(UserError, match=r"name one of its architecture, as a40 for an RTX 3090 \(sm_86\)"):
        Device.get("rtx3090")
    for key, name in (("a40", "RTX 3090"), ("rtx4090", "L4")):
        named, meant = Device.get(key), OTHERS[name]
        assert (named.arch, named.smem_per_block) == (meant.arch, meant.smem_per_block)
