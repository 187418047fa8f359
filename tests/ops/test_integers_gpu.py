"""int64 indices, lengths, tables and offsets on a GPU, in every version: no value stands for another."""

from __future__ import annotations

import functools
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import integer_cases as cases  # noqa: E402

from mla_var3.catalogue import registry  # noqa: E402
from mla_var3.device import Device  # noqa: E402
from mla_var3.errors import Unsupported  # noqa: E402
from mla_var3.ops import mla_decode, packed_mla_decode, sparse_mla_decode  # noqa: E402

pytestmark = pytest.mark.gpu

VERSIONS = [k for k in registry.all_kernels() if k.language not in ("torch", "peer")]
DECODE = [k.label for k in VERSIONS if k.design == "flash_mla"]
SPARSE = [k.label for k in VERSIONS if k.design == "sparse_mla"]
APPEND = [k.language for k in VERSIONS if k.design == "rope_append"]


def calls(function: Any, label: str) -> Any:
    language = registry.KernelId.parse(label).language
    if reason := registry.missing(language):
        pytest.skip(reason)
    return functools.partial(function, return_lse=True, kernel=label)


def hold(*arguments: Any) -> int:
    try:
        return cases.hold(*arguments)
    except Unsupported as error:
        pytest.skip(str(error))


@pytest.mark.parametrize("label", DECODE)
def test_decode(label: str) -> None:
    assert hold(cases.decode_cases("cuda"), calls(mla_decode, label)) == 14


@pytest.mark.parametrize("label", DECODE)
def test_decode_of_packed_queries(label: str) -> None:
    assert hold(cases.packed_query_cases("cuda"), calls(mla_decode, label)) == 7


@pytest.mark.parametrize("label", SPARSE)
@pytest.mark.parametrize("layout", cases.SPARSE)
def test_sparse_decode(layout: str, label: str) -> None:
    problem = cases.SPARSE[layout]
    assert hold(cases.sparse_cases(problem, "cuda"), calls(sparse_mla_decode, label), problem) >= 14


@pytest.mark.parametrize("label", SPARSE)
@pytest.mark.parametrize("layout", cases.PACKED)
def test_packed_decode(layout: str, label: str) -> None:
    problem = cases.PACKED[layout]
    assert hold(cases.packed_cases(problem, "cuda"), calls(packed_mla_decode, label), problem) == 14


@pytest.mark.parametrize("layout", [None, "v32", "v4", "flat", "v32_no_rope", "flat_no_rope"])
@pytest.mark.parametrize("language", APPEND)
@pytest.mark.parametrize("value", cases.BELOW)
def test_a_slot_far_below_zero_is_written_nowhere(value: int, language: str, layout: str | None) -> None:
    if layout is not None and language == "cutile-dsl":
        pytest.skip("cutile-dsl has no packed_append")
    if reason := registry.missing(language):
        pytest.skip(reason)
    cases.slots_are_kept(layout, language, value, "cuda", Device.detect())


def test_judging_never_waits() -> None:
    (_, wide, _), *_ = cases.decode_cases("cuda")
    mla_decode(**wide)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        mla_decode(**wide)
    finally:
        torch.cuda.set_sync_debug_mode("default")
