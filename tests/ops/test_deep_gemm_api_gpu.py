"""DeepGEMM's own attention tests, through our names: of its tests/test_attention.py those of the indexer's logits.

They need its package (`scripts/fetch_peers.py deep_gemm`) and its checkout, which MLA_VAR3_DEEP_GEMM names.
DG_MQA_NUM_CASES says how many of its cases are drawn, 10 of each form by default.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from mla_var3.catalogue import libraries
from mla_var3.ops import deep_gemm as ours

pytestmark = pytest.mark.gpu
CHECKOUT = "MLA_VAR3_DEEP_GEMM"


@pytest.fixture
def suite(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Its test file as a module, with our functions in place of its own, and without its timing."""
    reason = libraries.absent("deep_gemm")
    if reason is not None:
        pytest.skip(reason)
    folder = Path(os.environ.get(CHECKOUT, "")) / "tests"
    if not os.environ.get(CHECKOUT) or not (folder / "test_attention.py").is_file():
        pytest.skip(f"{CHECKOUT} names no checkout of DeepGEMM.")
    monkeypatch.setenv("DG_MQA_NUM_CASES", os.environ.get("DG_MQA_NUM_CASES", "10"))
    monkeypatch.syspath_prepend(str(folder))
    theirs: Any = importlib.import_module("deep_gemm")
    spec = importlib.util.spec_from_file_location("deep_gemm_test_attention", folder / "test_attention.py")
    assert spec is not None and spec.loader is not None
    module: Any = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)
    spec.loader.exec_module(module)
    calls: list[str] = []

    def counted(name: str) -> Any:
        def call(*args: Any, **options: Any) -> Any:
            calls.append(name)
            return getattr(ours, name)(*args, **options)

        return call

    for name in ours.__all__:
        assert hasattr(theirs, name)
        monkeypatch.setattr(theirs, name, counted(name))
    monkeypatch.setattr(module, "bench_kineto", lambda run, names, **_: (1.0,) * len(names))
    module.calls = calls
    return module


@pytest.mark.parametrize("form", ["test_mqa_logits", "test_paged_mqa_logits"])
def test_its_own_tests_pass_through_our_names(suite: Any, form: str) -> None:
    import random

    import torch

    torch.manual_seed(0)
    random.seed(0)
    getattr(suite, form)()
    assert len(suite.calls) > 20, "its tests call the functions of this package"
