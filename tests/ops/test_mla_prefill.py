"""`mla_prefill` and `flash_attn_varlen_func` without a GPU: torch computes, alone and behind an engine."""

from __future__ import annotations

import inspect
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from ops_fakes import CpuEngine  # noqa: E402
from public_calls import right  # noqa: E402
from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: E402

from mla_var3.errors import UserError  # noqa: E402
from mla_var3.ops import flash_attn_varlen_func, mla_prefill  # noqa: E402
from mla_var3.workload.prefill import PrefillProblem, make_inputs  # noqa: E402

TORCH = "torch/flash_attention"
CHUNKS = ((5, 9), (0, 3), (4, 0), (6, 2), (7, 7))
PROBLEM = PrefillProblem(b=5, h=4, h_kv=2, d=32, p=16, causal=True, lengths=CHUNKS)
OPS = torch.ops.mla_var3


# ---------------------------------------------------------------- results
@pytest.mark.parametrize("kernel", [None, TORCH])
@pytest.mark.parametrize(
    "problem",
    [
        PROBLEM,
        PROBLEM.replace(causal=False, dtype="fp16"),
        PROBLEM.replace(h=2, h_kv=2, d=32, p=0),
        PROBLEM.replace(strided_kv=True),
        PrefillProblem(b=2, s=40, h=2, d=16, p=8, causal=True, softmax_scale=-0.3),
    ],
    ids=lambda p: p.label,
)
def test_it_is_the_oracle(on_cpu: CpuEngine, problem: PrefillProblem, kernel: str | None) -> None:
    inputs = make_inputs(problem, seed=1)
    options: dict[str, Any] = {"causal": problem.causal, "scale": problem.softmax_scale, "kernel": kernel}
    out, lse = mla_prefill(*inputs, return_lse=True, **options)
    right(problem, inputs, (out, lse))
    assert torch.equal(mla_prefill(*inputs, **options), out)
    assert on_cpu.planned == (kernel is not None)
    into, sums = torch.full_like(out, torch.nan), torch.full_like(lse, torch.nan)
    assert mla_prefill(*inputs, out=into, lse=sums, **options) is into
    assert torch.equal(into, out) and torch.equal(sums, lse)


@pytest.mark.parametrize("kernel", [None, TORCH])
def test_rows_of_no_request_stay_as_they_are(on_cpu: CpuEngine, kernel: str | None) -> None:
    q, k, v, *offsets = make_inputs(PROBLEM, seed=1)
    longer = [torch.cat([x, torch.full_like(x[:3], torch.nan)]) for x in (q, k, v)]
    out, lse = torch.full((len(q) + 3, 4, 32), 7.0).bfloat16(), torch.full((4, len(q) + 3), 7.0)
    mla_prefill(*longer, *offsets, out=out, lse=lse, kernel=kernel)
    right(PROBLEM, (q, k, v, *offsets), (out[: len(q)], lse[:, : len(q)].contiguous()))
    assert bool((out[len(q) :] == 7.0).all()) and bool((lse[:, len(q) :] == 7.0).all())


def test_other_forms_of_the_same_tensors(on_cpu: CpuEngine) -> None:
    """int64 offsets, a q with gaps, k and v whose columns lie apart."""
    q, k, v, of_q, of_k = make_inputs(PROBLEM, seed=1)
    want = mla_prefill(q, k, v, of_q, of_k, kernel=TORCH)
    apart = torch.stack([q, q], 1)[:, 1]
    turned = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (k, v)]
    for given in ((q, k, v, of_q.long(), of_k.long()), (apart, k, v, of_q, of_k), (q, *turned, of_q, of_k)):
        assert torch.equal(mla_prefill(*given, kernel=TORCH), want)


def test_no_query_token_is_no_call(on_cpu: CpuEngine) -> None:
    for kernel in (None, TORCH):
        q, k, v, *offsets = make_inputs(PROBLEM.replace(b=2, lengths=((0, 3), (0, 0))))
        out, lse = mla_prefill(q, k, v, *offsets, return_lse=True, kernel=kernel)
        assert out.shape == (0, 4, 32) and lse.shape == (4, 0)
    assert on_cpu.planned == 0


@pytest.mark.parametrize("kernel", [None, TORCH])
def test_no_key_at_all_gives_zeros(on_cpu: CpuEngine, kernel: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel gets a row all the same, which is nobody's."""
    seen = []
    run = CpuEngine.run
    monkeypatch.setattr(
        CpuEngine, "run", lambda self, way, pd, given, *a, **o: (seen.append(given), run(self, way, pd, given, *a, **o))
    )
    inputs = make_inputs(PROBLEM.replace(b=2, lengths=((3, 0), (2, 0))))
    out, lse = mla_prefill(*inputs, return_lse=True, kernel=kernel)
    assert out.shape == (5, 4, 32) and bool((out == 0).all()) and bool((lse == -torch.inf).all())
    assert [len(given[1]) for given in seen] == ([] if kernel is None else [1])


def test_one_kernel_serves_all_lengths(on_cpu: CpuEngine) -> None:
    for lengths in (CHUNKS, CHUNKS[:2], ((90, 90),)):
        for strided in (False, True):
            problem = PROBLEM.replace(b=len(lengths), lengths=lengths, strided_kv=strided)
            inputs = make_inputs(problem, seed=2)
            right(problem, inputs, mla_prefill(*inputs, return_lse=True, kernel=TORCH))
    assert on_cpu.planned == 1
    mla_prefill(*inputs, scale=0.5, kernel=TORCH)
    mla_prefill(*inputs, scale=-0.5, kernel=TORCH)
    assert on_cpu.planned == 3


def test_a_workspace_that_sizes_may_decide_of_serves_no_other_sizes(
    on_cpu: CpuEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mla_var3.catalogue import registry
    from mla_var3.ops.engine import MOST_OF_ANY_SIZE

    plan_type = registry.get_plan(registry.KernelId.parse(TORCH))
    plan = plan_type.plan

    def planned(self: Any, *inputs: Any) -> Any:
        kernel = plan(self, *inputs)
        kernel.workspace_tensors = (torch.empty(MOST_OF_ANY_SIZE + 1, dtype=torch.uint8, device="meta"),)
        return kernel

    monkeypatch.setattr(plan_type, "plan", planned)
    with pytest.raises(AssertionError, match=f"has {MOST_OF_ANY_SIZE + 1} bytes of workspaces"):
        mla_prefill(*make_inputs(PROBLEM), kernel=TORCH)


# ---------------------------------------------------------------- which version
def test_where_no_version_takes_it_torch_computes(on_cpu: CpuEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    from mla_var3.dispatch import rules
    from mla_var3.ops import prefill as functions

    functions._way.cache_clear()
    monkeypatch.setattr(rules, "of", lambda workload: ())
    inputs = make_inputs(PROBLEM, seed=3)
    right(PROBLEM, inputs, mla_prefill(*inputs, return_lse=True, on=on_cpu))
    assert on_cpu.planned == 1
    on_cpu.current_capture = 3
    with pytest.raises(UserError, match="the one in torch, which waits for it: call outside of the capture"):
        mla_prefill(*inputs, on=on_cpu)
    functions._way.cache_clear()


def test_keys_with_gaps_are_copied_for_a_version_that_reads_none(
    on_cpu: CpuEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    from dataclasses import replace

    from mla_var3.catalogue import registry
    from mla_var3.ops import ways

    ways._taken.cache_clear()
    plan_type = registry.get_plan(registry.KernelId.parse(TORCH))
    monkeypatch.setattr(plan_type, "requires", replace(plan_type.requires, options=("grouped",)))
    inputs = make_inputs(PROBLEM.replace(strided_kv=True), seed=3)
    right(PROBLEM, inputs, mla_prefill(*inputs, return_lse=True, kernel=TORCH))
    ways._taken.cache_clear()


# ---------------------------------------------------------------- traced
def test_torch_compile_takes_it_whole(on_cpu: CpuEngine) -> None:
    inputs = make_inputs(PROBLEM, seed=4)
    want = mla_prefill(*inputs, return_lse=True)

    def both(*given: Any) -> Any:
        more = flash_attn_varlen_func(*given, 7, 9, causal=True, return_attn_probs=True)
        return (*mla_prefill(*given, return_lse=True), *more)

    found = torch.compile(both, fullgraph=True, backend="aot_eager")(*inputs)
    assert all(map(torch.equal, found, (*want, *want)))

    def into(out: Any, *given: Any) -> Any:
        return mla_prefill(*given, out=out) + 1

    out = torch.empty_like(want[0])
    assert torch.equal(torch.compile(into, fullgraph=True, backend="aot_eager")(out, *inputs), want[0] + 1)
    assert torch.equal(out, want[0])


def test_the_operators_are_what_torch_wants_of_one() -> None:
    inputs = make_inputs(PROBLEM.replace(b=2, lengths=((3, 5), (2, 2))), seed=4)
    torch.library.opcheck(OPS.mla_prefill.default, inputs, {"scale": 0.3, "causal": False})
    out, lse = OPS.mla_prefill(*inputs)
    torch.library.opcheck(OPS.mla_prefill_into.default, inputs, {"target": out, "lse": lse})


def test_fake_tensors_have_the_shapes() -> None:
    inputs = make_inputs(PROBLEM)
    with FakeTensorMode() as mode:
        fakes = [mode.from_tensor(x) for x in inputs]
        out, lse = mla_prefill(*fakes, return_lse=True)
    assert out.shape == (22, 4, 32) and out.dtype == torch.bfloat16 and lse.shape == (4, 22)


# ---------------------------------------------------------------- what does not fit
def call(**changes: Any) -> Any:
    names = ("q", "k", "v", "cu_seqlens_q", "cu_seqlens_k")
    given = dict(zip(names, make_inputs(PROBLEM), strict=True))
    given.update(changes)
    return mla_prefill(**given)


Q, K, V, OF_Q, OF_K = make_inputs(PROBLEM)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"q": 3}, "q is a int: pass a torch tensor"),
        ({"q": Q[None]}, r"q is \(1, 22, 4, 48\).*pass \(any, any, any\)"),
        ({"q": Q.float()}, "k is .* torch.bfloat16 .*: pass .* torch.float32"),
        ({"k": K[..., :32]}, r"k is \(21, 2, 32\).*pass \(any, any, 48\)"),
        ({"v": V[:-1]}, r"v is \(20, 2, 32\).*pass \(21, 2, any\)"),
        ({"v": torch.cat([V, V], -1)}, "v has 64 columns and k 48"),
        ({"v": V[..., :0]}, "v has 0 columns"),
        ({"k": K[:, :0], "v": V[:, :0]}, "4 heads of q do not share 0 heads of k and v"),
        ({"q": Q[:, :3]}, "3 heads of q do not share 2 heads of k and v evenly"),
        ({"cu_seqlens_q": OF_Q.float()}, "cu_seqlens_q is .* torch.float32 .*: pass .* torch.int32"),
        ({"cu_seqlens_q": OF_Q[:-1]}, r"cu_seqlens_k is \(6,\).*pass \(5\)"),
        ({"cu_seqlens_q": OF_Q[:1], "cu_seqlens_k": OF_K[:1]}, "where each request begins, and the end"),
        ({"cu_seqlens_k": OF_K.to("meta")}, "cu_seqlens_k is .* on meta: pass .* on cpu"),
        ({"cu_seqlens_q": OF_Q + 1}, "cu_seqlens_q is .* it must begin with 0"),
        ({"cu_seqlens_k": OF_K + torch.tensor([0, 0, 0, 0, 0, 1]).int()}, "and end at 21 tokens or before"),
        ({"cu_seqlens_q": torch.tensor([0, 7, 5, 9, 15, 22]).int()}, "never decrease"),
        ({"scale": float("nan")}, "scale is nan: pass a finite number"),
        ({"scale": torch.tensor(1.0)}, "scale is of type Tensor"),
        ({"out": Q}, r"out is \(22, 4, 48\).*pass \(22, 4, 32\)"),
        ({"lse": torch.empty(22, 4)}, r"lse is \(22, 4\).*pass \(4, 22\)"),
        ({"q": Q.clone().requires_grad_()}, "q requires a gradient and none is computed: call it under torch.no_grad"),
        ({"v": V.clone().requires_grad_()}, "pass v.detach"),
        ({"kernel": 3}, "q is on cpu: mla_prefill runs on an NVIDIA GPU|kernel is a int"),
        ({"kernel": TORCH}, "q is on cpu: mla_prefill runs on an NVIDIA GPU"),
    ],
)
def test_what_does_not_fit_is_told_in_one_sentence(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words) as caught:
        call(**changes)
    assert "\n" not in str(caught.value)


def test_a_gradient_is_refused_by_whoever_traces_too() -> None:
    q = Q.clone().requires_grad_()
    with pytest.raises(Exception, match="q requires a gradient"):
        torch.compile(mla_prefill, fullgraph=True, backend="aot_eager")(q, K, V, OF_Q, OF_K)
    with torch.no_grad():
        assert not mla_prefill(q, K, V, OF_Q, OF_K).requires_grad


# ---------------------------------------------------------------- flash_attn's function
def test_it_has_flash_attns_signature() -> None:
    """flash_attn 2.8's `flash_attn_varlen_func`, by name, order and default."""
    parameters = inspect.signature(flash_attn_varlen_func).parameters.values()
    found = [(p.name, p.default) for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
    empty = inspect.Parameter.empty
    first = ("q", "k", "v", "cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")
    assert found == [
        *((name, empty) for name in first),
        ("dropout_p", 0.0),
        ("softmax_scale", None),
        ("causal", False),
        ("window_size", (-1, -1)),
        ("softcap", 0.0),
        ("alibi_slopes", None),
        ("deterministic", False),
        ("return_attn_probs", False),
        ("block_table", None),
    ]


def test_flash_attns_function_is_mla_prefill() -> None:
    given = make_inputs(PROBLEM, seed=5)
    want, lse = mla_prefill(*given, causal=False, scale=0.2, return_lse=True)
    assert torch.equal(flash_attn_varlen_func(*given, 7, 9, softmax_scale=0.2), want)
    out, sums, probabilities = flash_attn_varlen_func(
        *given, 7, 9, 0.0, 0.2, False, (-1, -1), 0.0, None, True, return_attn_probs=True
    )
    assert torch.equal(out, want) and torch.equal(sums, lse) and probabilities.numel() == 0
    causal = flash_attn_varlen_func(*given, max_seqlen_q=7, max_seqlen_k=9, causal=True)
    assert torch.equal(causal, mla_prefill(*given)) and not torch.equal(causal, want)


@pytest.mark.parametrize(
    ("option", "words"),
    [
        ({"dropout_p": 0.1}, r"dropout_p is 0\.1, which no version computes; leave it at 0\.0"),
        ({"window_size": (128, 0)}, r"window_size is \(128, 0\), which .* leave it at \(-1, -1\)"),
        ({"softcap": 30.0}, r"softcap is 30\.0"),
        ({"alibi_slopes": torch.ones(4)}, "alibi_slopes is a Tensor"),
        ({"block_table": torch.ones(4, 1)}, "block_table is a Tensor, .*mla_chunk_prefill attends to a paged cache"),
        ({"softmax_scale": float("inf")}, "softmax_scale is inf"),
    ],
)
def test_what_flash_attn_has_more_is_refused_by_name(option: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words):
        flash_attn_varlen_func(*make_inputs(PROBLEM), 7, 9, **option)
