"""Calls of `mla_prefill` whose signature was judged before: they look a launch up, whatever the lengths, and a call
that does not fit is still told so in one sentence. A compiled function is stood in for by one that computes with torch
and compares its tensors as TVM-FFI's does."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("cutlass", reason="CuTe DSL is in the extra `cute`")

from ops_fakes import CpuEngine, not_compiled  # noqa: E402
from public_calls import right  # noqa: E402

from mla_var3.dispatch import boundaries, rules  # noqa: E402
from mla_var3.dispatch.rule import Bound, Quantity  # noqa: E402
from mla_var3.errors import UserError  # noqa: E402
from mla_var3.ops import engine as engine_module  # noqa: E402
from mla_var3.ops import mla_prefill  # noqa: E402
from mla_var3.ops import prefill as ops_prefill  # noqa: E402
from mla_var3.toolchain import aot  # noqa: E402
from mla_var3.workload import prefill  # noqa: E402
from mla_var3.workload.prefill import PrefillProblem, make_inputs  # noqa: E402

PROBLEM = PrefillProblem(b=3, h=2, d=64, p=32, causal=True, lengths=((5, 9), (0, 3), (7, 7)))
OTHER = PROBLEM.replace(b=2, lengths=((8, 8), (3, 20)))


class Compiled:
    """Computes, and refuses as TVM-FFI does. calls: how often it was called."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.calls = 0

    def __call__(self, q: Any, k: Any, v: Any, of_q: Any, of_k: Any, out: Any, lse: Any, *rest: Any) -> None:
        self.calls += 1
        n, m, requests = len(q), len(k), len(of_q)
        expected = (
            ("q", q, (n, 2, 96), torch.bfloat16), ("k", k, (m, 2, 96), torch.bfloat16),
            ("v", v, (m, 2, 64), torch.bfloat16), ("cu_seqlens_q", of_q, (requests,), torch.int32),
            ("cu_seqlens_k", of_k, (requests,), torch.int32), ("out", out, (n, 2, 64), torch.bfloat16),
            ("lse", lse, (2, n), torch.float32),
        )  # fmt: skip
        for name, tensor, shape, dtype in expected:
            if tensor.dtype != dtype or tensor.dim() != len(shape):
                raise ValueError(f"Mismatched Tensor {name}")
            if tuple(tensor.shape) != shape or tensor.stride(-1) != 1:
                raise ValueError(f"Mismatched {name}")
        problem = PrefillProblem(b=requests - 1, h=2, d=64, p=32, causal=True, lengths={"queries": n, "keys": m})
        prefill.write(problem, (q, k, v, of_q, of_k), (out, lse))


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> dict[str, Compiled]:
    """The stand-ins of compiled functions, by name."""
    found: dict[str, Compiled] = {}

    def load(source: Any, kind: Any, tiling: Any, device: Any, name: str, *_: Any, **__: Any) -> Any:
        found[name] = Compiled(name)
        return replace(not_compiled(), handle=found[name])

    monkeypatch.setattr(aot, "load_or_compile", load)
    return found


@pytest.fixture
def unjudged(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Makes any call that is judged or planned from then on fail."""

    def forbid() -> None:
        def never(*_: Any, **__: Any) -> Any:
            raise AssertionError("judged again")

        monkeypatch.setattr(ops_prefill, "judge", never)
        monkeypatch.setattr(ops_prefill, "_serve", never)

    return forbid


def test_calls_of_other_lengths_are_launched_without_being_judged(
    compiled: dict[str, Compiled], unjudged: Callable[[], None]
) -> None:
    engine = CpuEngine()
    mla_prefill(*make_inputs(PROBLEM, seed=1), on=engine)
    assert engine.planned == 1
    (function,) = compiled.values()
    assert function.calls == 1  # noting how it is called is no call
    unjudged()
    for problem in (PROBLEM, OTHER, PROBLEM.replace(b=1, lengths=((120, 200),))):
        inputs = make_inputs(problem, seed=2)
        right(problem, inputs, mla_prefill(*inputs, return_lse=True, on=engine))
        out = mla_prefill(*inputs, on=engine)
        lse = torch.empty(2, problem.query_tokens)
        into = torch.empty_like(out)
        assert mla_prefill(*inputs, out=into, lse=lse, on=engine) is into
        right(problem, inputs, (into, lse))
        assert torch.equal(into, out)
    assert function.calls == 1 + 3 * 3


def test_offsets_in_int64_are_narrowed_and_looked_up(
    compiled: dict[str, Compiled], unjudged: Callable[[], None]
) -> None:
    engine = CpuEngine()
    q, k, v, a, b = make_inputs(PROBLEM, seed=1)
    mla_prefill(q, k, v, a, b, on=engine)
    unjudged()
    right(PROBLEM, (q, k, v, a, b), mla_prefill(q, k, v, a.long(), b.long(), return_lse=True, on=engine))
    ends = a.long()
    ends[-1] = 2**32 + len(q)  # no int32: it becomes the nearest of those that there may be
    right(PROBLEM, (q, k, v, a, b), mla_prefill(q, k, v, ends, b.long(), return_lse=True, on=engine))


def test_an_lse_that_nobody_asked_for_lies_in_memory_of_the_kernel(
    compiled: dict[str, Compiled], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Calls of all lengths write the same memory; one that is too large for it gets its own, as does one that is
    returned."""
    monkeypatch.setattr(engine_module, "MOST_SPARE", 4 * 2 * 64)
    engine = CpuEngine()
    for tokens in (5, 64, 30, 65):
        inputs = make_inputs(PROBLEM.replace(b=1, lengths=((tokens, tokens),)), seed=1)
        for _ in range(2):
            mla_prefill(*inputs, on=engine)
    (bound,) = engine._kept.values()
    found = [x.spare for x in engine._remembered.values() if x.new_out is not None]
    assert bound.spare is not None and bound.spare.numel() == 2 * 64
    assert [None if x is None else tuple(x.shape) for x in found] == [(2, 5), (2, 64), (2, 30), None]
    assert found[1].data_ptr() == found[2].data_ptr() == bound.spare.data_ptr()
    inputs = make_inputs(PROBLEM.replace(b=1, lengths=((30, 30),)), seed=1)
    _, lse = mla_prefill(*inputs, return_lse=True, on=engine)
    assert lse.data_ptr() != found[2].data_ptr()


def test_what_cuda_is_asked_before_a_look_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another device than the current one, or a capture, takes the long way; the default stream is never captured."""
    device, stream, capturing = 0, 0, True
    asked = SimpleNamespace(
        _cuda_getDevice=lambda: device, _cuda_getCurrentRawStream=lambda index: stream + index,
        _cuda_isCurrentStreamCapturing=lambda: capturing,
    )  # fmt: skip
    monkeypatch.setattr(engine_module, "_bindings", lambda: asked)
    engine = engine_module.Engine()
    assert engine.plain_stream(0) == 0 and engine.plain_stream(1) is None
    stream = 7
    assert engine.plain_stream(0) is None
    capturing = False
    assert engine.plain_stream(0) == 7


def test_keys_with_gaps_are_remembered_by_their_strides(
    compiled: dict[str, Compiled], unjudged: Callable[[], None]
) -> None:
    engine = CpuEngine()
    mla_prefill(*make_inputs(PROBLEM.replace(strided_kv=True), seed=1), on=engine)
    unjudged()
    problem = OTHER.replace(strided_kv=True)
    inputs = make_inputs(problem, seed=1)
    assert not inputs[1].is_contiguous()
    right(problem, inputs, mla_prefill(*inputs, return_lse=True, on=engine))
    with pytest.raises(AssertionError, match="judged again"):
        mla_prefill(*make_inputs(OTHER, seed=1), on=engine)  # others are another signature


@pytest.mark.parametrize(
    "change",
    [
        lambda q, k, v, a, b: (q.transpose(0, 1).contiguous().transpose(0, 1), k, v, a, b),  # copied first
        lambda q, k, v, a, b: (q, k[:1].expand_as(k), v, a, b),  # rows over each other
        lambda q, k, v, a, b: (q, k, v, a.long(), b),
        lambda q, k, v, a, b: (q, k, v, torch.stack([a, a], 1)[:, 0], b),
    ],
    ids=["q with gaps", "k expanded", "int64 offsets", "offsets with gaps"],
)
def test_what_a_launch_does_not_take_goes_the_long_way(
    change: Callable[..., Any], compiled: dict[str, Compiled]
) -> None:
    engine = CpuEngine()
    inputs = make_inputs(PROBLEM, seed=1)
    mla_prefill(*inputs, on=engine)
    changed = change(*inputs)
    right(PROBLEM, changed, mla_prefill(*changed, return_lse=True, on=engine))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda q, k, v, a, b: (q, k[1:], v, a, b), "v is"),
        (lambda q, k, v, a, b: (q, k, v[..., :0], a, b), "v (m, h_kv, dv): dv = 0 is too small"),
        (lambda q, k, v, a, b: (q, k, v, a, b[1:]), "cu_seqlens_k is"),
        (lambda q, k, v, a, b: (q, k, v, a.float(), b), "cu_seqlens_q is"),
        (lambda q, k, v, a, b: (q.requires_grad_(), k, v, a, b), "q requires a gradient"),
        (lambda q, k, v, a, b: (q, None, v, a, b), "k is a NoneType"),
        (lambda q, k, v, a, b: (q, k.half(), v, a, b), "k is"),
    ],
)
def test_what_does_not_fit_is_told_as_in_a_first_call(
    change: Callable[..., Any], words: str, compiled: dict[str, Compiled]
) -> None:
    engine = CpuEngine()
    mla_prefill(*make_inputs(PROBLEM, seed=1), on=engine)
    with pytest.raises(UserError) as raised:
        mla_prefill(*change(*make_inputs(PROBLEM, seed=1)), on=engine)
    assert str(raised.value).startswith(words)


@pytest.mark.parametrize(
    ("name", "given"),
    [
        ("lse", torch.empty(2, 13)), ("lse", torch.empty(24)), ("lse", torch.empty(2, 24)[:, ::2]),
        ("out", torch.empty(12, 2, 32).bfloat16()), ("out", torch.empty(12, 2, 64)), ("out", [1]),
    ],
)  # fmt: skip
def test_a_result_that_does_not_fit_is_told_as_in_a_first_call(
    name: str, given: Any, compiled: dict[str, Compiled]
) -> None:
    engine = CpuEngine()
    inputs = make_inputs(PROBLEM, seed=1)
    assert len(inputs[0]) == 12
    mla_prefill(*inputs, on=engine)
    with pytest.raises(UserError, match=f"^{name} "):
        mla_prefill(*inputs, on=engine, **{name: given})


def test_arguments_that_another_kernel_serves_are_other_signatures(
    compiled: dict[str, Compiled], unjudged: Callable[[], None]
) -> None:
    engine = CpuEngine()
    inputs = make_inputs(PROBLEM, seed=1)
    mla_prefill(*inputs, on=engine)
    unjudged()
    for options in ({"causal": False}, {"scale": 0.3}, {"kernel": "cute-dsl/flash_attention_v22"}, {"scale": True}):
        with pytest.raises(AssertionError, match="judged again"):
            mla_prefill(*inputs, on=engine, **options)
    engine.current_stream = 5  # whose workspaces are others
    with pytest.raises(AssertionError, match="judged again"):
        mla_prefill(*inputs, on=engine)


def test_captures_and_forgetting_take_the_long_way(
    compiled: dict[str, Compiled], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = CpuEngine()
    inputs = make_inputs(PROBLEM, seed=1)
    mla_prefill(*inputs, on=engine)
    engine.current_capture = 7
    mla_prefill(*inputs, on=engine)
    assert engine.planned == 2  # with a workspace of the graph's own
    engine.current_capture = None
    engine.forget()
    mla_prefill(*inputs, on=engine)
    assert engine.planned == 3


def test_kernels_that_remembered_calls_use_outlive_those_that_nothing_uses(compiled: dict[str, Compiled]) -> None:
    engine = CpuEngine(most_kernels=2)

    def call(scale: float) -> None:
        mla_prefill(*make_inputs(PROBLEM, seed=1), scale=scale, on=engine)

    for scale in (0.5, 0.6, 0.7):  # the first one goes
        call(scale)
    planned = engine.planned
    call(0.6)
    call(0.8)  # one of 0.6 and 0.7 goes, and 0.6 was used last
    call(0.6)
    assert engine.planned == planned + 1
    call(0.7)
    assert engine.planned == planned + 2
    assert len(engine._kept) == 2 and {found.bound.kernel for found in engine._remembered.values()} == {
        bound.kernel for bound in engine._kept.values()
    }


def test_lengths_on_the_other_side_of_a_rule_are_chosen_for_anew(
    compiled: dict[str, Compiled], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rule about tokens of a request: calls on one side of it share a launch, those on the other another one."""
    tokens = Quantity("tokens", lambda pd: pd.s, lambda pd, value: ())
    monkeypatch.setattr(ops_prefill, "boundaries", lambda workload: (Bound(tokens, 20),))
    monkeypatch.setattr(ops_prefill, "_regime", ops_prefill._regime.__wrapped__)
    engine = CpuEngine()
    served: list[int] = []
    serve = ops_prefill._serve

    def watched(problem: PrefillProblem, *rest: Any) -> None:
        served.append(problem.s)
        serve(problem, *rest)

    monkeypatch.setattr(ops_prefill, "_serve", watched)
    for s in (5, 20, 21, 7, 300, 21):
        problem = PrefillProblem(b=2, s=s, h=2, d=64, p=32, causal=True)
        inputs = make_inputs(problem, seed=s)
        right(problem, inputs, mla_prefill(*inputs, return_lse=True, on=engine))
    assert served == [5, 21]


def test_a_call_asks_only_for_boundaries_in_lengths(
    compiled: dict[str, Compiled], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The signature holds all else, and of lengths that were seen the answer is kept."""
    in_lengths = {"query tokens", "keys", "keys that a query sees", "query tiles"}
    assert {bound.quantity.name for bound in boundaries("prefill")} <= in_lengths
    engine = CpuEngine()
    inputs = make_inputs(PROBLEM, seed=1)
    mla_prefill(*inputs, on=engine)
    monkeypatch.setattr(Bound, "holds", lambda *_: pytest.fail("asked again"))
    (function,) = compiled.values()
    mla_prefill(*inputs, on=engine)
    assert function.calls == 2


def test_rules_say_which_of_their_boundaries_are_in_lengths() -> None:
    """A quantity is said to be of the class only where sizes leave it as it is."""
    few, many = PROBLEM, PROBLEM.replace(b=1, lengths=((4000, 9000),))
    for rule in rules.of("prefill"):
        for bound in rule.where:
            if bound.quantity.of_class:
                assert bound.quantity.of(few) == bound.quantity.of(many)
            else:
                assert bound in boundaries("prefill")


def test_lengths_that_were_seen_are_looked_up_at_once(
    compiled: dict[str, Compiled], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second call with the same lengths works nothing out; signatures do not pile up."""
    engine = CpuEngine()
    inputs = make_inputs(PROBLEM, seed=1)
    for _ in range(2):
        mla_prefill(*inputs, on=engine)
    monkeypatch.setattr(ops_prefill, "_alike", lambda *_: pytest.fail("asked again"))
    right(PROBLEM, inputs, mla_prefill(*inputs, return_lse=True, on=engine))
    monkeypatch.undo()
    monkeypatch.setattr(engine_module, "MOST_SIGNATURES", 3)
    for tokens in range(1, 9):
        other = make_inputs(PROBLEM.replace(b=1, lengths=((tokens, tokens),)), seed=1)
        right(PROBLEM.replace(b=1, lengths=((tokens, tokens),)), other, mla_prefill(*other, return_lse=True, on=engine))
        assert len(engine._remembered) <= 3
