"""scripts/flash_mla_suite.py without FlashMLA and without a GPU: a folder with the parts of its tests that are used."""

from __future__ import annotations

import json
import sys
import time
from enum import Enum
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch")

#: Cases by their number: 3 ends its process, 4 is wrong, 5 is refused, 6 is right at its second run.
TEST = """
import types, torch
from mla_var3.errors import UserError

torch.set_default_device = lambda device: None
torch.cuda.synchronize = lambda: None

class Case(types.SimpleNamespace):
    def to_test_param(self):
        return types.SimpleNamespace(seed=-1, s_q=1, topk=64, decode=types.SimpleNamespace(b=4, extra_topk=None))

def gen_testcase():
    fields = {"h_q": 64, "s_q": 1, "s_kv": 512, "topk": 64, "d_qk": 576, "have_topk_length": False, "extra_topk": None,
              "enable_attn_sink": True, "extra_s_k": None, "extra_block_size": None, "have_extra_topk_length": False}
    return [Case(b=4, block_size=64 if i < 6 else 61, **fields) for i in range(8)]

def run(case, made, meta, _):
    if case.seed == 3:
        raise RuntimeError("the context is lost")
    if case.seed == 5:
        raise UserError("no such head.")
    return torch.tensor([case.seed]), torch.tensor([0])

def same(name, found, wanted, **bounds):
    print("out is", found.tolist())
    return torch.equal(found, wanted)

def made(case):
    scope = types.SimpleNamespace(indices_in_kvcache=torch.arange(4), topk_length=None)
    return types.SimpleNamespace(q=torch.arange(4), kv_scope=scope, extra_kv_scope=None)

def reference(case, made):
    return torch.tensor([0 if case.seed == 4 else case.seed]), torch.tensor([0])

KVScope, quant = types.SimpleNamespace(), None
lib = types.SimpleNamespace(generate_testcase_for_decode=made, run_flash_mla_decode=run, KVScope=KVScope, quant=quant)
ref = types.SimpleNamespace(ref_sparse_attn_decode=reference)
kk = types.SimpleNamespace(check_is_allclose=same)
"""

#: Cases by their numbers of heads: of dense decode, as its `main` has them. 3 is wrong; without --kernel all are.
DENSE = """
import types, torch, flash_mla

torch.set_default_device = lambda device: None
torch.cuda.synchronize = lambda: None
flash_mla.mla_decode = lambda *given, kernel="", **more: kernel

def flash_mla_with_kvcache(q, cache, table, lengths, columns, meta, splits, causal):
    return q if flash_mla.mla_decode() == "cute-dsl/named" else -1, 0

flash_mla.flash_mla_with_kvcache = flash_mla_with_kvcache

def test_flash_mla(case):
    raise AssertionError("the test's own run of a case")

def main(dtype):
    torch.set_default_dtype(dtype)
    torch.set_default_device(torch.device("cuda:0"))
    torch.cuda.set_device(0)
    assert torch.cuda.get_device_capability()[0] == 9
    for h in (1, 3):
        for s in (1, 2):
            for causal in (False, True):
                fields = {"h_q": h, "s_q": s, "s_k": 64, "h_kv": 1, "is_causal": causal, "dv": 512, "seed": 0}
                test_flash_mla(types.SimpleNamespace(b=2, **fields))

def generate_test_data(case):
    return 0, case.h_q, 0, 0

def reference_torch(lengths, table, q, cache, dv, causal):
    return (-3 if q == 3 else q), 0

kk = types.SimpleNamespace(check_is_allclose=lambda name, found, wanted, **bounds: found == wanted)
"""


@pytest.fixture
def suite(repo_root: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(repo_root / "scripts"))
    monkeypatch.setitem(sys.modules, "flash_mla", None)  # type: ignore[arg-type]
    import flash_mla_suite

    return flash_mla_suite


def test_a_run_goes_on_where_the_one_before_ended(suite: Any, tmp_path: Path) -> None:
    (tmp_path / suite.FILES[0]).write_text(TEST, encoding="utf-8")
    done = tmp_path / "done.jsonl"
    done.write_text('{"case": 0, "verdict": "right", "why": ""}\n{"case": 6, "verdict": "no room", "why": ""}\n{"ca')
    before = suite.already(done)
    assert before == {0: ("right", "")}
    made, device = suite.Suite.of(tmp_path), suite.Device.get("h200")
    classes = suite.classes_of(made.cases, device, (1, 1), set(before))
    assert classes == [[1, 2, 3, 4, 5], [6, 7]]
    assert [suite.classes_of(made.cases, device, (n, 2), set()) for n in (1, 2)] == [[[*range(6)]], [[6, 7]]]
    done.write_text("")
    # No two cases at a time have room, and one that has too little gets it alone.
    run = suite.Run(tmp_path, done, classes[::-1], time.monotonic() + 120, 1)
    run.all(2)
    verdicts = {number: (verdict, why) for number, verdict, why in run.found}
    assert verdicts == {
        **dict.fromkeys((1, 2, 6, 7), ("right", "")),
        3: ("wrong", "RuntimeError: the context is lost"),
        4: ("wrong", "out is [4] out is [0]"),
        5: ("refused", "no such head."),
    }
    lines = [json.loads(line) for line in done.read_text().splitlines()]
    assert {line["case"]: (line["verdict"], line["why"]) for line in lines} == verdicts
    assert not any(each.process.is_alive() for each in run.workers)


@pytest.mark.parametrize(("width", "page"), [(576, 2), (576, 61), (512, 64), (512, 53)])
def test_rows_that_no_index_names_are_packed_once(suite: Any, width: int, page: int) -> None:
    """Bytes, strides and unpacked rows are those of a function that packs all rows. Of 512 columns scales lie behind a
    page's rows, and of 576 pages have a gap behind them, as in FlashMLA's tests."""
    import torch

    given = []

    def pack(cache: Any, layout: int) -> Any:
        pages, tokens = cache.shape[:2]
        given.append(pages * tokens)
        words = cache.reshape(pages, tokens, width).view(torch.uint8)
        scales = words[..., :8] + layout
        if width == 576:
            whole = torch.empty((pages, tokens + 1, 2 * width + 8), dtype=torch.uint8)[:, :tokens]
            whole[..., : 2 * width], whole[..., 2 * width :] = words, scales
        else:
            each = tokens * (2 * width + 8)
            whole = torch.empty((pages, -(-each // 576) * 576), dtype=torch.uint8)[:, :each]
            whole[:, : tokens * 2 * width] = words.reshape(pages, -1)
            whole[:, tokens * 2 * width :] = scales.reshape(pages, -1)
        return whole.view(pages, tokens, 1, -1)

    def unpack(cache: Any, layout: int) -> Any:
        pages, tokens = cache.shape[:2]
        words = cache[..., : 2 * width] if width == 576 else cache.view(pages, -1)[:, : tokens * 2 * width]
        return -layout * words.reshape(pages, tokens, 1, -1).view(torch.bfloat16)

    Layouts = Enum("Layouts", {"V32_FP8Sparse": 1, "MODEL1_FP8Sparse": 2})
    numbers = SimpleNamespace(**{layout.name: layout for layout in Layouts})
    quant = SimpleNamespace(
        FP8KVCacheLayout=numbers,
        quantize_k_cache=lambda cache, layout: pack(cache, layout.value),
        dequantize_k_cache=lambda cache, layout: unpack(cache, layout.value),
    )
    cache = torch.randn((8, page, 1, width), generator=torch.Generator().manual_seed(1)).bfloat16()
    names = torch.rand((8, page), generator=torch.Generator().manual_seed(2)) < 0.3
    cache[~names] = float("nan")
    layout = Layouts.V32_FP8Sparse if width == 576 else Layouts.MODEL1_FP8Sparse
    wanted = quant.quantize_k_cache(cache, layout)
    unpacked = quant.dequantize_k_cache(wanted, layout)
    scope = SimpleNamespace(blocked_k=cache.clone(), t=SimpleNamespace(d_qk=width))
    given.clear()
    suite.pack_used(scope, quant)
    assert sum(given) < int(names.sum()) + 64 + 2 * page + 1
    found = scope.blocked_k_quantized
    assert found.stride() == wanted.stride() and torch.equal(found, wanted)
    torch.testing.assert_close(scope.blocked_k, unpacked, rtol=0, atol=0, equal_nan=True)


def test_bundled_classes_are_cut_into_lists(suite: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Equal classes of code have their cases run in several processes, and what would be compiled is left out."""
    pytest.importorskip("cutlass", reason="nvidia-cutlass-dsl is not installed")
    (tmp_path / suite.FILES[0]).write_text(TEST, encoding="utf-8")
    made, device, aot = suite.Suite.of(tmp_path), suite.Device.get("h200"), suite.aot
    assert suite.classes_of(made.cases, device, (1, 1), set(), bundled=True) == []
    plan = suite.registry.get_plan(suite.registry.KernelId.parse(suite.KERNEL))
    plan = plan(suite.problem_of(made.cases[0]), None, device)
    code_class, source = plan.code_class(plan.problem), aot.source_of(plan).hash
    key = aot.make_key(source, code_class, plan.tiling, device, "sparse_mla_v2")
    monkeypatch.setattr(aot, "bundle_dirs", lambda: [tmp_path])
    monkeypatch.setattr(aot, "entries_of", lambda folder: [{"identity": key.identity}])
    monkeypatch.setattr(suite, "TOGETHER", 4)
    assert suite.classes_of(made.cases, device, (1, 1), set(), bundled=True) == [[0, 1, 2, 3], [4, 5]]
    assert suite.classes_of(made.cases, device, (2, 2), {5}, bundled=True) == [[4]]
    made.cases[5].s_kv = 4096  # needs more memory
    assert suite.classes_of(made.cases, device, (1, 1), set(), bundled=True) == [[5, 0, 1, 2], [3, 4]]
    # In passes: every third case, then those behind them, and what needs least memory first.
    monkeypatch.setattr(suite, "TOGETHER", 1)
    passes = suite.classes_of(made.cases, device, (1, 1), {1}, bundled=True, passes=3)
    assert passes == [[0], [3], [4], [2], [5]]
    # More query tokens than the version takes together are requests of their own.
    many = plan.problem.replace(s=4096)
    assert suite.class_of(many, device) == suite.class_of(many.replace(b=4 * 4096, s=1), device)


def test_expected_results_are_those_of_a_few_requests_at_a_time(suite: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    asked = []

    def reference(case: Any, made: Any) -> Any:
        scopes = [made.kv_scope, *([made.extra_kv_scope] if made.extra_kv_scope else [])]
        sizes = {len(each.indices_in_kvcache) for each in scopes} | {len(made.q), case.decode.b}
        sizes |= {len(each.topk_length) for each in scopes if each.topk_length is not None}
        asked.append(sizes)
        gathered = sum(each.cache[each.indices_in_kvcache].sum(-1) for each in scopes)
        return made.q * gathered, made.q

    def scope(length: Any) -> Any:
        indices = torch.arange(10).view(5, 2)
        return SimpleNamespace(cache=torch.arange(10.0) ** 2, indices_in_kvcache=indices, topk_length=length)

    made = SimpleNamespace(q=torch.arange(5.0), kv_scope=scope(None), extra_kv_scope=scope(torch.arange(5)))
    case = SimpleNamespace(s_q=3, topk=2, decode=SimpleNamespace(b=5, extra_topk=2))
    whole = reference(case, made)
    monkeypatch.setattr(suite, "PAIRS", 2 * 3 * 4)
    made_of = SimpleNamespace(ref=SimpleNamespace(ref_sparse_attn_decode=reference))
    for found, wanted in zip(suite.expected(made_of, case, made), whole, strict=True):
        assert torch.equal(found, wanted)
    assert asked == [{5}, {2}, {2}, {1}] and case.decode.b == 5
    monkeypatch.setattr(suite, "PAIRS", 1)
    suite.expected(made_of, case, made)
    assert asked[4:] == [{1}] * 5


def test_dense_cases_run_with_the_version_that_is_named(
    suite: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / suite.DENSE).write_text(DENSE, encoding="utf-8")
    monkeypatch.setattr(suite.flash_mla, "mla_decode", None)
    monkeypatch.setattr(suite.flash_mla, "flash_mla_with_kvcache", None)
    made, device = suite.Suite.of(tmp_path, dense=True), suite.Device.get("h200")
    classes = suite.classes_of(made.cases, device, (1, 1), set(), "cute-dsl/flash_mla_v23")
    # One query token has no mask.
    assert sorted(classes) == [[0, 1], [2], [3], [4, 5], [6], [7]]
    for kernel, right in (("cute-dsl/named", [0, 1, 2, 3]), ("", [])):
        run = suite.Run(
            tmp_path, tmp_path / f"{kernel[:4]}.jsonl", [[*range(8)]], time.monotonic() + 90, 1, True, kernel
        )
        run.all(1)
        assert sorted(number for number, verdict, _ in run.found if verdict == "right") == right
        assert len(run.found) == 8


def test_a_run_ends_in_time(suite: Any, tmp_path: Path) -> None:
    (tmp_path / suite.FILES[0]).write_text(TEST, encoding="utf-8")
    run = suite.Run(tmp_path, tmp_path / "done.jsonl", [[1, 2]], time.monotonic() + 1, 1)
    run.all(2)
    assert not run.found


@pytest.mark.parametrize("text", ["0/4", "5/4", "1", "a/b"])
def test_a_part_is_one_of_several(suite: Any, text: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    with pytest.raises(SystemExit):
        suite.main([str(tmp_path), "--part", text])
    assert "give it as 2/4" in capsys.readouterr().err


def test_another_folder_is_refused(suite: Any, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    with pytest.raises(SystemExit):
        suite.main([str(tmp_path)])
    assert "give the folder tests of FlashMLA's checkout" in capsys.readouterr().err
