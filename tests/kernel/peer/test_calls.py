"""The path of a call: schedules made in plan(), arguments in the library's order, results in the house's form.

The libraries are imitated: functions registered with torch under the extensions' names and schemas, computed by the
oracle on the CPU and returned as the real ones return them (-inf for a row without keys, base 2, heads first).
"""

from __future__ import annotations

import sys
import types
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from mla_var3.catalogue import libraries, registry
from mla_var3.check.judge import check
from mla_var3.errors import UserError
from mla_var3.kernel import library as wrapping
from mla_var3.kernel.peer import mla_flashinfer
from mla_var3.workload import prefill, sparse_decode
from mla_var3.workload.decode import PROMISED, MlaProblem, make_inputs, mla_decode_reference
from mla_var3.workload.sparse_decode import SparseProblem

CASES_HERE = ("own", "edges", "planned")
PROBLEM = MlaProblem(b=3, s=2, t=150, h=4, causal=True, dtype="fp16")

FA3_FWD = """fwd(Tensor! q, Tensor k, Tensor v, Tensor? k_new, Tensor? v_new, Tensor? q_v, Tensor!? out,
    Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, Tensor? cu_seqlens_k_new, Tensor? seqused_q, Tensor? seqused_k,
    int? max_seqlen_q, int? max_seqlen_k, Tensor? page_table, Tensor? kv_batch_idx, Tensor? leftpad_k,
    Tensor? rotary_cos, Tensor? rotary_sin, Tensor? seqlens_rotary, Tensor? q_descale, Tensor? k_descale,
    Tensor? v_descale, float softmax_scale, bool is_causal, int window_size_left, int window_size_right, float softcap,
    bool is_rotary_interleaved, Tensor? scheduler_metadata, int num_splits, bool? pack_gqa, int sm_margin,
    Tensor? s_aux, int cp_world_size, int cp_rank, Tensor? cp_tot_seqused_k) -> Tensor[]"""
FA3_PLAN = """get_scheduler_metadata(int batch_size, int max_seqlen_q, int max_seqlen_k, int num_heads,
    int num_heads_k, int headdim, int headdim_v, ScalarType qkv_dtype, Tensor seqused_k, Tensor? cu_seqlens_q,
    Tensor? cu_seqlens_k, Tensor? cu_seqlens_k_new, Tensor? seqused_q, Tensor? leftpad_k, int? page_size,
    int max_seqlen_k_new, bool is_causal, int window_size_left, int window_size_right, bool has_softcap,
    int num_splits, bool? pack_gqa, int sm_margin) -> Tensor"""
FLASH_MLA = """dense_decode_fwd(Tensor _0, Tensor _1, int _2, Tensor _3, Tensor _4, float _5, bool _6, Tensor? _7,
    Tensor? _8, Tensor? _9) -> (Tensor, Tensor, Tensor?, Tensor?)"""
_KEPT: list[Any] = []


def _attend(q: Any, cache: Any, table: Any, lens: Any, scale: float, causal: bool) -> tuple[Any, Any]:
    out, lse = mla_decode_reference(q, cache, table, lens, k=512, scale=scale, causal=causal)
    lse = lse.float()
    return out.to(q.dtype), lse.masked_fill(lse == float("inf"), float("-inf"))


def _prefill(
    q: Any, k: Any, v: Any, out: Any, of_q: Any, of_k: Any, longest: tuple[int, int], scale: float, causal: bool
) -> list[Any]:
    """FlashAttention's varlen entry: values are as wide as keys, or 128 beside 192."""
    assert v.shape[-1] == k.shape[-1] or (k.shape[-1], v.shape[-1]) == (192, 128)
    assert longest == (int(of_q.diff().max()), int(of_k.diff().max()))
    result, lse = prefill.prefill_reference(q, k, v, of_q, of_k, scale=scale, causal=causal)
    out.copy_(result)
    return [out, lse.float()]


@pytest.fixture(scope="module")
def extensions() -> dict[str, list[Any]]:
    """Imitations of the two extensions, registered once; what they were called with."""
    calls: dict[str, list[Any]] = {"fa3_plan": [], "fa3": [], "flash_mla": []}
    fa3 = torch.library.Library("_vllm_fa3_C", "DEF")
    fa3.define(FA3_FWD)
    fa3.define(FA3_PLAN)

    def plan(*arguments: Any) -> Any:
        calls["fa3_plan"].append(arguments)
        return torch.full((5,), 77, dtype=torch.int32)

    def forward(q: Any, k: Any, v: Any, *rest: Any) -> list[Any]:
        q_v, out, starts, lens, longest_q, table = rest[2], rest[3], rest[4], rest[8], rest[9], rest[11]
        scale, causal, metadata = rest[20], rest[21], rest[26]
        calls["fa3"].append(rest)
        if q_v is None:
            return _prefill(q, k, v, out, starts, rest[5], (longest_q, rest[10]), scale, causal)
        assert metadata is not None and bool((metadata == 77).all()), "the schedule of plan() comes back"
        assert starts.tolist() == list(range(0, q.shape[0] + 1, longest_q))
        b = len(lens)
        rows = torch.cat([q_v, q], -1).view(b, longest_q, q.shape[1], 576)
        o, lse = _attend(rows, torch.cat([v, k], -1), table, lens, scale, causal)
        out.copy_(o.view(out.shape))
        return [out, lse.transpose(0, 1).reshape(q.shape[1], -1).contiguous(), out.new_empty(0), out.new_empty(0)]

    fa3.impl("fwd", forward, "CPU")
    fa3.impl("get_scheduler_metadata", plan, "CPU")
    mla = torch.library.Library("_flashmla_C", "DEF")
    mla.define(FLASH_MLA)

    def decode(
        q: Any,
        cache: Any,
        dv: int,
        lens: Any,
        table: Any,
        scale: float,
        causal: bool,
        schedule: Any,
        splits: Any,
        extra: Any,
    ) -> tuple[Any, ...]:
        assert extra is None
        calls["flash_mla"].append((schedule, splits))
        if schedule is None:
            schedule, splits = torch.ones(4, 8, dtype=torch.int32), torch.ones(len(lens) + 1, dtype=torch.int32)
        return (*_attend(q, cache, table, lens, scale, causal), schedule.clone(), splits.clone())

    mla.impl("dense_decode_fwd", decode, "CPU")
    _KEPT.extend((fa3, mla))
    return calls


def _plan_type(name: str) -> Any:
    return registry.get_plan(registry.KernelId("peer", "mla", name))


def _passes_the_check(name: str, problem: MlaProblem = PROBLEM) -> None:
    report = check(_plan_type(name), problem, device="cpu", cases=CASES_HERE, seeds=[3])
    assert report.ok, report.reason


def test_fa3_qv(extensions: Any, fetched: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    fetched("vllm/vllm_flash_attn/_vllm_fa3_C.abi3.so")
    monkeypatch.setattr(torch.ops, "load_library", lambda path: None)
    _passes_the_check("fa3_qv")
    inputs = make_inputs(PROBLEM, "cpu", poison=False)
    planned = len(extensions["fa3_plan"])
    bound = _plan_type("fa3_qv")(PROBLEM).plan(*inputs)
    assert len(extensions["fa3_plan"]) == planned + 1
    b, longest_q, longest_k, heads, heads_k, headdim, headdim_v = extensions["fa3_plan"][-1][:7]
    assert (b, longest_q, heads, heads_k, headdim, headdim_v) == (3, 2, 4, 1, 64, 512)
    assert longest_k == inputs[2].shape[1] * 64
    for _ in range(3):
        bound()
    assert len(extensions["fa3_plan"]) == planned + 1, "calls plan nothing"


def test_flash_mla_of_the_wheel(extensions: Any, fetched: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    fetched("vllm/_flashmla_C.abi3.so")
    monkeypatch.setattr(torch.ops, "load_library", lambda path: None)
    _passes_the_check("flash_mla_vllm")
    extensions["flash_mla"].clear()
    bound = _plan_type("flash_mla_vllm")(PROBLEM).plan(*make_inputs(PROBLEM, "cpu"))
    assert [schedule is None for schedule, _ in extensions["flash_mla"]] == [True]
    bound()
    bound()
    assert [schedule is None for schedule, _ in extensions["flash_mla"]] == [True, False, False]


@pytest.mark.parametrize("new_interface", [True, False])
def test_flash_mla_installed(new_interface: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both interfaces: the older makes the schedule when asked, the newer one in the first call."""
    fake = types.ModuleType("flash_mla")
    made: list[str] = []

    def metadata(lens: Any, rows: int, heads: int) -> tuple[Any, Any]:
        made.append("new" if new_interface else f"{rows} {heads}")
        return (types.SimpleNamespace(ready=False), None) if new_interface else (torch.ones(1), torch.ones(1))

    def decode(
        q: Any,
        cache: Any,
        table: Any,
        lens: Any,
        dv: int,
        schedule: Any,
        splits: Any,
        *,
        softmax_scale: float,
        causal: bool,
    ) -> tuple[Any, Any]:
        assert (splits is None) == new_interface
        return _attend(q, cache, table, lens, softmax_scale, causal)

    fake.get_mla_metadata = metadata  # type: ignore[attr-defined]
    fake.flash_mla_with_kvcache = decode  # type: ignore[attr-defined]
    (tmp_path / "flash_mla").mkdir()
    (tmp_path / "flash_mla" / "flash_mla_interface.py").write_text("")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert registry.missing(registry.KernelId("peer", "mla", "flash_mla_lib")) is None
    monkeypatch.setitem(sys.modules, "flash_mla", fake)
    monkeypatch.setattr(
        "mla_var3.catalogue.libraries.package_dirs", lambda name: [tmp_path / name] if name == "flash_mla" else []
    )
    _passes_the_check("flash_mla_lib")
    assert made


#: Cases of sparse decode that neither library takes, or a GPU alone has.
NOT_HERE = {"in_place", "many", "far", "missing_nan", *PROMISED}


@pytest.mark.parametrize("layout", ["v32", "bf16"])
def test_fa3_sparse(
    layout: str, extensions: Any, fetched: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    fetched("vllm/vllm_flash_attn/_vllm_fa3_C.abi3.so")
    monkeypatch.setattr(torch.ops, "load_library", lambda path: None)
    monkeypatch.setattr("mla_var3.kernel.library._CHUNK", 7 * 3 * 576)
    plan_type = _plan_type("fa3_sparse")
    problem = SparseProblem(b=3, s=2, h=5, t=90, topk=40, page=7, layout=layout, lengths=True)
    report = check(plan_type, problem, device="cpu", seeds=[3])
    assert report.ok, report.reason
    lacking = {"lengths", "extra"} | ({"scales", "codes", "subnormal"} if layout == "bf16" else set())
    assert {case.name for case in report.cases} == set(sparse_decode.CASES) - NOT_HERE - lacking
    for s in (1, 2):  # where a request has one query token, q is given with its strides
        apart = problem.replace(s=s, strided=True, contexts="half_short")
        assert check(plan_type, apart, device="cpu", cases=["own", "holes"], seeds=[3]).ok
        (q, *_) = inputs = sparse_decode.make_inputs(apart, "cpu")
        plan_type(apart).plan(*inputs)()
        assert (extensions["fa3"][-1][2].data_ptr() == q.data_ptr()) == (s == 1)

    given = sparse_decode.named(problem, *sparse_decode.make_inputs(problem, "cpu", dist="holes"))
    bound = plan_type(problem).plan(*given.values())
    b, longest_q, longest_k, heads, _, headdim, headdim_v = extensions["fa3_plan"][-1][:7]
    assert (b, longest_q, longest_k, heads, headdim, headdim_v) == (6, 1, 40, 5, 64, 512)
    planned = len(extensions["fa3_plan"])
    bound()
    bound.with_schedule()
    assert len(extensions["fa3_plan"]) == planned + 1, "only a call with a schedule of its own plans"
    lens, table = extensions["fa3"][-1][8], extensions["fa3"][-1][11]
    assert table.shape == (6, 40) and table.dtype == lens.dtype == torch.int32
    tokens = given["cache"].shape[0] * 7
    for row, indices in enumerate(given["indices"].view(6, 40)):
        attended = [i for i in indices[: given["lengths"][row // 2]].tolist() if 0 <= i < tokens]
        assert table[row, : lens[row]].tolist() == attended
        assert set(table[row, lens[row] :].tolist()) <= {0}


# ---------------------------------------------------------------- prefill
PROMPTS = (
    prefill.PrefillProblem(b=2, s=70, h=2, causal=True, dtype="fp16"),
    prefill.PrefillProblem(b=4, h=4, h_kv=2, causal=True, lengths=((7, 90), (0, 3), (5, 0), (33, 33)), d=64, p=32),
    prefill.PrefillProblem(b=3, h=2, lengths=(50, 0, 9), d=128, p=128),
)


def _prefills(name: str, problem: prefill.PrefillProblem) -> None:
    plan_type = _plan_type(name)
    report = check(plan_type, problem, device="cpu", cases=["own", "ragged", "chunks"], seeds=[3])
    assert report.ok and len(report.cases) == 3, report.reason


@pytest.mark.parametrize("problem", PROMPTS, ids=lambda p: p.label)
def test_fa3(
    extensions: Any, fetched: Callable[..., Path], problem: prefill.PrefillProblem, monkeypatch: pytest.MonkeyPatch
) -> None:
    fetched("vllm/vllm_flash_attn/_vllm_fa3_C.abi3.so")
    monkeypatch.setattr(torch.ops, "load_library", lambda path: None)
    _prefills("fa3", problem)
    strided = problem.replace(strided_kv=True)
    _plan_type("fa3")(strided).plan(*prefill.make_inputs(strided))()
    assert tuple(extensions["fa3"][-1][9:11]) == problem.longest


@pytest.mark.parametrize("problem", PROMPTS, ids=lambda p: p.label)
@pytest.mark.parametrize("newer", [False, True])
def test_fa4(problem: prefill.PrefillProblem, newer: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []

    def packed(
        q: Any, k: Any, v: Any, cu_seqlens_q: Any = None, cu_seqlens_k: Any = None,
        softmax_scale: Any = None, causal: Any = None, out: Any = None, lse: Any = None,
    ) -> None:  # fmt: skip
        seen.append(q.dim())
        if q.dim() == 4:
            b, s = q.shape[:2]
            offsets = [torch.arange(b + 1) * x.shape[1] for x in (q, k)]
            flat = [x.flatten(0, 1) for x in (q, k, v)]
            found, own = prefill.prefill_reference(*flat, *offsets, scale=softmax_scale, causal=causal)
            out.copy_(found.view(out.shape))
            lse.copy_(own.view(-1, b, s).transpose(0, 1))
            return
        lse.copy_(_prefill(
            q, k, v, out, cu_seqlens_q, cu_seqlens_k,
            (int(cu_seqlens_q.diff().max()), int(cu_seqlens_k.diff().max())), softmax_scale, causal,
        )[1])  # fmt: skip

    def with_longest(
        *given: Any, max_seqlen_q: int | None = None, max_seqlen_k: int | None = None, **rest: Any
    ) -> None:
        assert (max_seqlen_q is None) == (given[0].dim() == 4)
        packed(*given, **rest)

    module = types.ModuleType("flash_attn.cute.interface")
    module._flash_attn_fwd = with_longest if newer else packed  # type: ignore[attr-defined]
    for name in ("flash_attn", "flash_attn.cute"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    library = libraries.Library("fa4", "package", tmp_path, "4.0.0", "an imitation")
    monkeypatch.setitem(libraries._LOOK, "fa4", lambda: library)
    _prefills("fa4", problem)
    assert set(seen) == {3, 4} if problem.uniform else {3}


@pytest.mark.parametrize("problem", PROMPTS, ids=lambda p: p.label)
def test_flashinfer_ragged(problem: prefill.PrefillProblem, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Wrapper:
        def __init__(self, workspace: Any, layout: str, backend: str) -> None:
            assert workspace.dtype == torch.uint8 and (layout, backend) == ("NHD", "fa3")

        def plan(self, qo_indptr: Any, kv_indptr: Any, heads: int, kv_heads: int, dk: int, **options: Any) -> None:
            self.offsets, self.heads, self.options = (qo_indptr, kv_indptr), (heads, kv_heads, dk), options

        def run(self, q: Any, k: Any, v: Any, *, out: Any, lse: Any, return_lse: bool) -> None:
            assert return_lse and (q.shape[1], k.shape[1], q.shape[2]) == self.heads
            assert out.shape[-1] == v.shape[-1] == self.options["head_dim_vo"]
            scale, causal = self.options["sm_scale"], self.options["causal"]
            longest = tuple(int(x.diff().max()) for x in self.offsets)
            _, natural = _prefill(q, k, v, out, *self.offsets, longest, scale, causal)  # type: ignore[arg-type]
            lse.copy_(natural.t() * 1.4426950408889634)

    module = types.ModuleType("flashinfer")
    module.BatchPrefillWithRaggedKVCacheWrapper = Wrapper  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "flashinfer", module)
    library = libraries.Library("flashinfer_ragged", "package", tmp_path, "0.7", "an imitation")
    monkeypatch.setitem(libraries._LOOK, "flashinfer_ragged", lambda: library)
    _prefills("flashinfer_ragged", problem)


class _SparseLibrary:
    """FlashMLA's sparse decode over packed caches by the oracle, as strict as the library."""

    def __init__(self) -> None:
        self.calls: list[dict[str, Any]] = []

    def get_mla_metadata(self) -> tuple[Any, None]:
        return types.SimpleNamespace(made=False), None

    def flash_mla_with_kvcache(
        self,
        q: Any,
        k_cache: Any,
        block_table: Any,
        cache_seqlens: Any,
        head_dim_v: int,
        tile_scheduler_metadata: Any,
        softmax_scale: float,
        is_fp8_kvcache: bool,
        indices: Any,
        attn_sink: Any,
        extra_k_cache: Any,
        extra_indices_in_kvcache: Any,
        topk_length: Any,
        extra_topk_length: Any,
    ) -> tuple[Any, Any]:
        layout = {576: "v32", 512: "v4"}[q.shape[3]]
        assert block_table is None and cache_seqlens is None and head_dim_v == 512 and is_fp8_kvcache
        assert q.shape[2] in (64, 128) and k_cache.dim() == 4 and k_cache.shape[2] == 1
        assert layout == "v4" or (topk_length is None and extra_k_cache is None)
        assert (extra_k_cache is None) == (extra_indices_in_kvcache is None)
        self.calls.append({"schedule": tile_scheduler_metadata.made, "q": q, "indices": indices, "sink": attn_sink})
        tile_scheduler_metadata.made = True
        sizes: dict[str, Any] = {"page": k_cache.shape[1], "lengths": topk_length is not None}
        inputs = [q, *self.part(k_cache, indices), *(x for x in (topk_length, attn_sink) if x is not None)]
        if extra_k_cache is not None:
            sizes |= {"extra": extra_indices_in_kvcache.shape[2], "extra_page": extra_k_cache.shape[1]}
            sizes |= {"extra_lengths": extra_topk_length is not None}
            inputs += self.part(extra_k_cache, extra_indices_in_kvcache)
            inputs += [x for x in (extra_topk_length,) if x is not None]
        problem = SparseProblem(
            h=q.shape[2], layout=layout, sink=attn_sink is not None, softmax_scale=softmax_scale, **sizes
        )
        out, lse = sparse_decode.reference(problem, *inputs)
        return out.to(q.dtype), lse.float()

    def part(self, cache: Any, indices: Any) -> list[Any]:
        assert indices.shape[2] % 64 == 0 and indices.dtype == torch.int32
        assert bool(((indices >= -1) & (indices < cache.shape[0] * cache.shape[1])).all()), "it would read there"
        return [cache.squeeze(2), indices]


@pytest.fixture
def sparse_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> _SparseLibrary:
    made = _SparseLibrary()
    library = libraries.Library("flash_mla_sparse", "package", tmp_path, "1", "an imitation")
    monkeypatch.setitem(libraries._LOOK, "flash_mla_sparse", lambda: library)
    monkeypatch.setitem(sys.modules, "flash_mla", made)  # type: ignore[arg-type]
    return made


SPARSE = {
    "v32": SparseProblem(b=3, s=2, h=5, t=90, topk=40, page=7, lengths=True),
    "v4": SparseProblem(
        b=2, h=65, t=90, topk=40, page=7, layout="v4", lengths=True, sink=True, extra=24, extra_lengths=True
    ),
}


@pytest.mark.parametrize("layout", SPARSE)
def test_flash_mla_sparse(layout: str, sparse_library: _SparseLibrary) -> None:
    report = check(_plan_type("flash_mla_sparse"), SPARSE[layout], device="cpu", seeds=[3])
    assert report.ok, report.reason
    apart = SPARSE[layout].replace(strided=True, contexts="short", missing="scattered:0.3")
    assert check(_plan_type("flash_mla_sparse"), apart, device="cpu", cases=["own", "holes"], seeds=[3]).ok
    lacking = {"scales"} | ({"extra"} if layout == "v32" else set())
    assert {case.name for case in report.cases} == set(sparse_decode.CASES) - NOT_HERE - lacking


def test_flash_mla_sparse_copies_only_what_it_must(sparse_library: _SparseLibrary) -> None:
    problem = SparseProblem(b=2, h=64, t=150, topk=128, sink=True)
    q, _, indices, _ = inputs = sparse_decode.make_inputs(problem, "cpu")
    bound = _plan_type("flash_mla_sparse")(problem).plan(*inputs)
    bound()
    bound.with_schedule()
    assert [call["schedule"] for call in sparse_library.calls] == [False, True, False]
    assert all(call["q"] is q and call["indices"] is indices for call in sparse_library.calls)
    apart = problem.replace(strided=True, contexts="half_short")
    q, _, indices, _ = inputs = sparse_decode.make_inputs(apart, "cpu")
    _plan_type("flash_mla_sparse")(apart).plan(*inputs)()
    call = sparse_library.calls[-1]
    assert call["q"] is q and call["indices"] is indices and not q.is_contiguous() and not indices.is_contiguous()
    few = problem.replace(h=20)
    inputs = sparse_decode.make_inputs(few, "cpu", dist="holes")
    bound = _plan_type("flash_mla_sparse")(few).plan(*inputs)
    out, lse = bound()
    call = sparse_library.calls[-1]
    assert call["q"].shape == (2, 1, 64, 576) and not call["q"][:, :, 20:].any() and call["sink"].shape == (64,)
    assert out.shape == (2, 1, 20, 512) and lse.shape == (2, 20, 1)
    assert (call["indices"] == -1).any() and (inputs[2] != call["indices"]).any()


def test_an_older_flash_mla_is_one_sentence(sparse_library: _SparseLibrary, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sparse_library, "flash_mla_with_kvcache", lambda q, k_cache: None)
    with pytest.raises(UserError, match=r"flash_mla 1 has no extra_k_cache: .* has a newer one"):
        _plan_type("flash_mla_sparse")(SPARSE["v32"]).plan(*sparse_decode.make_inputs(SPARSE["v32"], "cpu"))


class _FlashInferModule:
    """FlashInfer's functions by a softmax in float64 over compressed rows, with the log-sum-exp to base 2."""

    def __init__(self) -> None:
        self.state: dict[str, Any] = {}

    def attend(self, parts: Sequence[Any], pages: Any, out: Any, lse: Any, scale: float, causal: bool) -> None:
        starts, offsets, lens = self.state["index"]
        cache = torch.cat([parts[2], parts[3]], -1).unsqueeze(2)
        q = torch.cat([parts[0], parts[1]], -1)
        for i, length in enumerate(lens.tolist()):
            rows = slice(int(starts[i]), int(starts[i + 1]))
            own = pages[int(offsets[i]) : int(offsets[i + 1])]
            assert len(own) == -(-length // cache.shape[1])
            table = own.unsqueeze(0) if len(own) else torch.zeros((1, 1), dtype=torch.int32)
            o, e = _attend(q[rows].unsqueeze(0), cache, table, torch.tensor([length]), scale, causal)
            out[rows] = o[0]
            lse[rows] = e[0].t() / wrapping.LN2

    def plan(self, floats: Any, ints: Any, staged: Any, starts: Any, offsets: Any, lens: Any, *rest: Any) -> Any:
        heads, columns = rest[:2]
        assert columns == 512 and ints.shape == staged.shape
        self.state.update(index=(starts, offsets, lens), heads=heads)
        staged[:16] = 9
        return [1, 2], 16

    def run(self, floats: Any, ints: Any, info: Any, *rest: Any) -> None:
        parts, (pages, out, lse, mask, heads, page, scale, base_e) = rest[:4], rest[4:12]
        assert info == [1, 2] and bool((ints[:16] == 9).all()) and heads == self.state["heads"] and base_e is False
        assert page == parts[2].shape[1]
        self.attend(parts, pages, out, lse, scale, bool(mask))


@pytest.mark.parametrize("layout", ["v32", "bf16"])
def test_flashinfer_sparse(layout: str, fetched: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    fetched("flashinfer/batch_mla_fa3.so")
    module = _FlashInferModule()
    monkeypatch.setattr(mla_flashinfer, "_load_module", lambda path: module)
    plan_type = _plan_type("flashinfer_sparse")
    problem = SparseProblem(b=3, s=2, h=5, t=90, topk=40, page=7, layout=layout, lengths=True)
    report = check(plan_type, problem, device="cpu", seeds=[3])
    assert report.ok, report.reason
    for s in (1, 2):
        apart = problem.replace(s=s, strided=True, contexts="short")
        assert check(plan_type, apart, device="cpu", cases=["own", "holes"], seeds=[3]).ok

    given = sparse_decode.named(problem, *sparse_decode.make_inputs(problem, "cpu", dist="holes"))
    plan_type(problem).plan(*given.values())
    starts, offsets, lens = module.state["index"]
    tokens = given["cache"].shape[0] * 7
    counts = [
        sum(0 <= i < tokens for i in indices[: given["lengths"][row // 2]].tolist())
        for row, indices in enumerate(given["indices"].view(6, 40))
    ]
    assert starts.tolist() == list(range(7)) and lens.tolist() == counts
    assert offsets.tolist() == [sum(counts[:row]) for row in range(7)]


@pytest.mark.parametrize("backend", ["fa3", "fa2"])
@pytest.mark.parametrize("kind", ["module", "package"])
def test_flashinfer(
    backend: str, kind: str, fetched: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = _FlashInferModule()
    state = module.state

    class Wrapper:
        def __init__(self, floats: Any, backend: str) -> None:
            assert floats.dtype == torch.uint8
            state["backend"] = backend

        def plan(self, **given: Any) -> None:
            assert given["head_dim_ckv"] == 512 and given["head_dim_kpe"] == 64
            state.update(index=(given["qo_indptr"], given["kv_indptr"], given["kv_len_arr"]), given=given)
            self.given = given

        def run(
            self, *, q_nope: Any, q_pe: Any, ckv_cache: Any, kpe_cache: Any, out: Any, lse: Any, return_lse: bool
        ) -> None:
            g = self.given
            parts = (q_nope, q_pe, ckv_cache, kpe_cache)
            module.attend(parts, g["kv_indices"], out, lse, g["sm_scale"], g["causal"])

    problem = PROBLEM.replace(dtype="bf16")
    if kind == "module":
        fetched(f"flashinfer/batch_mla_{backend}.so")
        monkeypatch.setattr(mla_flashinfer, "_load_module", lambda path: module)
        _passes_the_check(f"flashinfer_{backend}", problem)
        with pytest.raises(UserError, match="built for bf16"):
            _plan_type(f"flashinfer_{backend}")(PROBLEM).plan(*make_inputs(PROBLEM, "cpu"))
        return
    (tmp_path / "flashinfer" / "mla").mkdir(parents=True)
    monkeypatch.setattr(
        "mla_var3.catalogue.libraries.package_dirs", lambda name: [tmp_path / name] if name == "flashinfer" else []
    )
    fake = types.ModuleType("flashinfer.mla")
    fake.BatchMLAPagedAttentionWrapper = Wrapper  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "flashinfer", types.ModuleType("flashinfer"))
    monkeypatch.setitem(sys.modules, "flashinfer.mla", fake)
    _passes_the_check(f"flashinfer_{backend}", problem)
    assert state["backend"] == backend


EXAMPLE = """
import torch, tilelang

made = []


def mla_decode_tilelang(b, h, h_kv, longest, dv, dpe, n, m, splits, page{scale}):
    made.append((b, h, h_kv, longest, dv, dpe, n, m, splits, page))

    def kernel(q, q_pe, kv, k_pe, table, lens, glse, partial):
        assert q.shape == (b, h, dv) and q_pe.shape == (b, h, dpe)
        assert kv.shape == (b * longest, 1, dv) and k_pe.shape == (b * longest, 1, dpe)
        assert table.shape == (b, longest // page) and lens.shape == (b,)
        assert glse.shape == (b, h, splits) and partial.shape == (b, h, splits, dv)
        assert all(x.is_contiguous() for x in (q, q_pe, kv, k_pe, table, lens, glse, partial))
        assert splits == 1 or splits * n <= int(lens.min()), "a split without tokens"
        out = torch.full((b, h, dv), float("nan"), dtype=q.dtype)
        for i, length in enumerate(lens.tolist()):
            if length:
                at = torch.arange(length)
                rows = table[i].long()[at // page] * page + at % page
                keys = torch.cat([kv[rows, 0], k_pe[rows, 0]], -1).double()
                p = (torch.cat([q[i], q_pe[i]], -1).double() @ keys.t() * softmax_scale).softmax(-1)
                out[i] = (p @ keys[:, :dv]).to(q.dtype)
        return out

    return kernel
"""


@pytest.fixture
def tilelang(fetched: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Path]]:
    """TileLang and its example in the fetched folder; returns the example's path."""

    def make(scale: str = ", softmax_scale=None") -> Path:
        fetched("tilelang/packages/tilelang/__init__.py", text="from tvm_ffi import mine\n")
        fetched("tilelang/packages/tvm_ffi/__init__.py", text="mine = True\n")
        text = EXAMPLE.replace("{scale}", scale)
        return fetched("tilelang/example_mla_decode_paged.py", version="0.1.14", origin="its archive", text=text)

    mine = ("tilelang", "tvm_ffi", "mla_var3_peers_tilelang_example")
    before = {name: sys.modules.pop(name, None) for name in mine}
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield make
    monkeypatch.undo()  # what a test put in place of these modules; then they are as they were
    for name, module in before.items():
        sys.modules.pop(name, None)
        if module is not None:
            sys.modules[name] = module


def test_tilelang(tilelang: Callable[..., Path]) -> None:
    path = tilelang()
    library = libraries.find("tilelang_mla")
    assert library is not None and (library.path, library.version, library.origin) == (path, "0.1.14", "its archive")
    _passes_the_check("tilelang_mla", MlaProblem(b=3, t=150, h=16, dtype="fp16"))
    made = sys.modules["mla_var3_peers_tilelang_example"].made
    # b, heads, caches of heads, tokens, latent, rope, tokens and heads of a tile, splits, page
    assert set(made) == {(2, 16, 1, 192, 512, 64, 64, 16, 2, 64), (8, 16, 1, 192, 512, 64, 64, 16, 1, 64)}


def test_tilelang_takes_a_cache_of_more_pages_than_the_table(tilelang: Callable[..., Path]) -> None:
    tilelang()
    problem = MlaProblem(b=2, t=200, h=16, dtype="fp16")
    q, cache, table, lens = make_inputs(problem, "cpu", seed=1, poison=False, spare_pages=3)
    bound = _plan_type("tilelang_mla")(problem).plan(q, cache, table, lens)
    out, _ = bound.bind(q, cache, table, lens)()
    made = sys.modules["mla_var3_peers_tilelang_example"].made
    assert [x[3] for x in made] == [6 * 64], "compiled once, for the pages there are and one more, so that all rows fit"
    expected, _ = _attend(q, cache, table, lens, problem.scale, False)
    assert float((out.double() - expected.double()).norm() / expected.double().norm()) < 2e-3


def test_tilelang_says_what_it_cannot_do(
    tilelang: Callable[..., Path], fetched: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    problem = MlaProblem(b=1, t=64, h=16, dtype="fp16")
    inputs = make_inputs(problem, "cpu", poison=False)
    tilelang(scale="")
    with pytest.raises(UserError, match=r"softmax_scale, which .* is not: use a newer one"):
        _plan_type("tilelang_mla")(problem).plan(*inputs)
    for name in ("tilelang", "mla_var3_peers_tilelang_example"):
        monkeypatch.delitem(sys.modules, name)
    elsewhere = types.ModuleType("tvm_ffi")
    elsewhere.__file__, elsewhere.__version__ = "/elsewhere/tvm_ffi/__init__.py", "0.1.15"  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "tvm_ffi", elsewhere)
    with pytest.raises(UserError, match=r"has loaded TVM-FFI 0\.1\.15 .* a run of its own"):
        _plan_type("tilelang_mla")(problem).plan(*inputs)
    monkeypatch.delitem(sys.modules, "tvm_ffi")
    fetched("tilelang/packages/tilelang/__init__.py", text="import no_such_module_of_tilelang")
    with pytest.raises(UserError, match="does not load: No module named 'no_such_module_of_tilelang'"):
        _plan_type("tilelang_mla")(problem).plan(*inputs)


@pytest.mark.parametrize(
    ("problem", "fits"),
    [({}, True), ({"h": 32}, True), ({"h": 8}, False), ({"h": 96}, False), ({"s": 2}, False), ({"page": 128}, False)],
)
def test_tilelang_takes_what_its_tiles_fit(problem: dict[str, Any], fits: bool, tilelang: Callable[..., Path]) -> None:
    tilelang()
    verdict = _plan_type("tilelang_mla").requires.accepts(MlaProblem(**{"b": 2, "t": 256, "dtype": "fp16", **problem}))
    assert bool(verdict) == fits


@pytest.mark.parametrize(
    ("b", "h", "shortest", "splits"),
    [(128, 128, 4096, 1), (1, 128, 65536, 66), (1, 16, 131072, 132), (1, 16, 200, 3), (1, 16, 0, 1), (8, 64, 4096, 16)],
)
def test_tilelang_splits_what_leaves_the_device_idle(b: int, h: int, shortest: int, splits: int) -> None:
    from mla_var3.kernel.peer.mla_tilelang import splits_for

    assert splits_for(b, h, shortest, 132) == splits


def test_page_indices_leave_out_garbage() -> None:
    garbage = 2147480000
    table = torch.tensor([[3, 1, garbage], [garbage] * 3, [5, 0, 2]], dtype=torch.int32)
    offsets, pages, lens = wrapping.page_indices(table, torch.tensor([65, 0, 192], dtype=torch.int32), 64)
    assert offsets.tolist() == [0, 2, 2, 5] and pages.tolist() == [3, 1, 5, 0, 2] and lens.tolist() == [65, 0, 192]
    assert offsets.dtype == pages.dtype == lens.dtype == torch.int32


def test_natural_lse() -> None:
    given = torch.tensor([float("-inf"), 2.0])
    assert wrapping.natural_lse(given).tolist() == [float("inf"), 2.0]
    assert wrapping.natural_lse(given, base2=True)[1].item() == pytest.approx(2.0 * 0.693147180)


def test_a_schema_of_another_release_is_named_not_called() -> None:
    argument = types.SimpleNamespace
    optional, plain = torch.OptionalType(torch.TensorType.get()), torch.IntType.get()

    class Op:
        _schema = argument(
            arguments=[
                argument(name="q", type=plain, has_default_value=lambda: False, default_value=None),
                argument(name="extra", type=optional, has_default_value=lambda: False, default_value=None),
                argument(name="n", type=plain, has_default_value=lambda: True, default_value=4),
            ]
        )

        def __str__(self) -> str:
            return "lib.fwd"

    assert wrapping.named_arguments(Op(), {"q": 1}) == [1, None, 4]
    with pytest.raises(UserError, match=r"wants 'q'"):
        wrapping.named_arguments(Op(), {})
    with pytest.raises(UserError, match=r"has no gone"):
        wrapping.named_arguments(Op(), {"q": 1, "gone": 2})


def test_a_library_that_does_not_load_is_one_sentence(fetched: Callable[..., Path]) -> None:
    fetched("vllm/_flashmla_C.abi3.so", text="no object at all")
    with pytest.raises(UserError, match=r"does not load into torch .* must be the build"):
        _plan_type("flash_mla_vllm")(PROBLEM).plan(*make_inputs(PROBLEM, "cpu"))


def test_results_are_converted_when_read_and_not_in_the_call() -> None:
    reads: list[int] = []

    def read() -> tuple[Any, Any]:
        reads.append(1)
        return torch.zeros(1, 1, 1, 512), torch.zeros(1, 1, 1)

    bound = wrapping.PeerKernel("x", wrapping.Attached(lambda: None, read), input_tensors=(torch.zeros(1),))
    result = bound()
    assert not reads and len(result) == 2 and bool(bound.output_tensors)
    _, lse = result
    assert reads == [1] and lse.shape == (1, 1, 1)
    with pytest.raises(UserError, match="planned without tensors"):
        wrapping.PeerKernel("x", None)()


def test_an_empty_plan_says_that_there_is_nothing_to_compile() -> None:
    from mla_var3.device import Device
    from mla_var3.workload.prefill import PrefillProblem

    with pytest.raises(UserError, match="library's binary"):
        _plan_type("fa4")(PrefillProblem(s=64)).plan_empty().compile(None, Device.get("h200"))


@pytest.mark.parametrize(
    ("b", "rows", "splits"),
    [(128, 128, 1), (128, 8, 1), (64, 128, 1), (32, 512, 1), (32, 128, 0), (8, 128, 0), (1, 8, 0)],
)
def test_fa3_is_not_asked_to_split_what_fills_the_device(b: int, rows: int, splits: int) -> None:
    from mla_var3.kernel.peer.mla_flash_attention import splits_for

    assert splits_for(b, rows, 132) == splits
