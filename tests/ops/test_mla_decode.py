"""`mla_decode` without a GPU: arguments, kept kernels, streams, captures; the torch version computes."""

from __future__ import annotations

import functools
import threading
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from ops_fakes import CpuEngine  # noqa: E402
from public_calls import pages_apart, same  # noqa: E402

from mla_var3.catalogue import registry  # noqa: E402
from mla_var3.device import Device  # noqa: E402
from mla_var3.errors import Unsupported, UserError  # noqa: E402
from mla_var3.ops import DecodeSchedule, mla_decode, ways  # noqa: E402
from mla_var3.ops import decode as decode_module  # noqa: E402
from mla_var3.ops import engine as engine_module  # noqa: E402
from mla_var3.workload.decode import MlaProblem, make_inputs, mla_decode_reference  # noqa: E402

PROBLEM = MlaProblem(h=4, causal=True, s=2, t=1, lengths=[70, 0, 129], b=3)


@pytest.fixture
def engine() -> CpuEngine:
    return CpuEngine()


def inputs(problem: MlaProblem = PROBLEM, seed: int = 0) -> tuple[Any, ...]:
    return make_inputs(problem, "cpu", seed=seed, dist="normal")


def expected(given: tuple[Any, ...], scale: float, causal: bool = True) -> tuple[Any, Any]:
    out, lse = mla_decode_reference(*given, k=512, scale=scale, causal=causal)
    return out.to(given[0].dtype), lse.float()


def call(engine: CpuEngine, given: tuple[Any, ...], **options: Any) -> Any:
    options = {"causal": True, "return_lse": True, "kernel": "torch/flash_mla", **options}
    return mla_decode(*given, on=engine, **options)


# ---------------------------------------------------------------- a schedule
class _Shared:
    """Of a version whose calls share a schedule: what the engine asks of it."""

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel
        self.schedule = torch.zeros(6, dtype=torch.int32)
        self.asked: list[tuple[Any, bool]] = []

    def launch_with(self, words: Any, made: bool) -> None:
        self.asked.append((words, made))
        self.kernel.launch()


@pytest.fixture
def sharing(engine: CpuEngine, monkeypatch: pytest.MonkeyPatch) -> list[_Shared]:
    """The kernels that the engine has planned, as if all of them shared schedules."""
    planned: list[_Shared] = []
    plan = engine._plan

    def shared(*arguments: Any) -> Any:
        bound = plan(*arguments)
        bound.scheduled = _Shared(bound.kernel)
        planned.append(bound.scheduled)
        return bound

    monkeypatch.setattr(engine, "_plan", shared)
    return planned


def test_the_first_call_makes_the_schedule_that_others_read(engine: CpuEngine, sharing: list[_Shared]) -> None:
    steps = [DecodeSchedule(), DecodeSchedule()]
    for schedule in steps:
        for seed in range(3):
            given = inputs(seed=seed)
            assert same(call(engine, given, schedule=schedule), expected(given, 192**-0.5))
    (kernel,) = sharing
    assert [made for _, made in kernel.asked] == [False, True, True] * 2
    read = [schedule.words for schedule in steps for _ in range(3)]
    assert all(words is wanted for (words, _), wanted in zip(kernel.asked, read, strict=True))
    assert all(schedule.words is not None and schedule.words.shape == (6,) for schedule in steps)
    assert steps[0].words is not steps[1].words


def test_a_schedule_is_refused_by_calls_of_other_shapes(engine: CpuEngine, sharing: list[_Shared]) -> None:
    schedule = DecodeSchedule()
    call(engine, inputs(), schedule=schedule)
    with pytest.raises(UserError, match="schedule was made for other shapes"):
        call(engine, inputs(PROBLEM.replace(h=8)), schedule=schedule)
    assert len(sharing[0].asked) == 1


def test_versions_without_a_schedule_leave_it_alone(engine: CpuEngine) -> None:
    given, schedule = inputs(), DecodeSchedule()
    assert same(call(engine, given, schedule=schedule), expected(given, 192**-0.5))
    assert schedule.words is None


# ---------------------------------------------------------------- results
@pytest.mark.parametrize("scale", [None, 576**-0.5, 1.0])
def test_computes_attention_with_the_scale_it_is_given(engine: CpuEngine, scale: float | None) -> None:
    given = inputs()
    assert same(call(engine, given, scale=scale), expected(given, 192**-0.5 if scale is None else scale))


def test_returns_out_alone_unless_the_lse_is_asked_for(engine: CpuEngine) -> None:
    given = inputs()
    out = call(engine, given, return_lse=False)
    assert torch.equal(out, expected(given, 192**-0.5)[0])


def test_writes_into_the_callers_tensors(engine: CpuEngine) -> None:
    given = inputs()
    out, lse = torch.full((3, 2, 4, 512), 7.0, dtype=torch.bfloat16), torch.full((3, 4, 2), 7.0)
    found = call(engine, given, out=out, lse=lse)
    assert found[0] is out and found[1] is lse
    assert same((out, lse), expected(given, 192**-0.5))


def test_one_kernel_serves_other_tensors_and_keeps_earlier_results(engine: CpuEngine) -> None:
    sets = [inputs(seed=i) for i in range(3)]
    found = [call(engine, given) for given in sets]
    assert engine.planned == 1
    assert all(same(f, expected(given, 192**-0.5)) for f, given in zip(found, sets, strict=True))
    assert len({f[0].data_ptr() for f in found}) == 3


def test_a_cache_with_more_pages_needs_no_other_kernel(engine: CpuEngine) -> None:
    q, cache, table, lens = inputs()
    call(engine, (q, cache, table, lens))
    wider = torch.cat([cache, torch.full_like(cache, float("nan"))])
    assert same(call(engine, (q, wider, table, lens)), expected((q, cache, table, lens), 192**-0.5))
    assert engine.planned == 1


def test_no_memory_of_the_caller_is_kept_alive(engine: CpuEngine) -> None:
    call(engine, inputs())
    (bound,) = engine._kept.values()
    assert all(x.numel() == 0 for x in (*bound.inputs, *bound.outputs))


def test_lengths_are_read_when_the_kernel_runs(engine: CpuEngine) -> None:
    given = inputs()
    call(engine, given)
    given[3].copy_(torch.tensor([3, 0, 65], dtype=torch.int32))
    assert same(call(engine, given), expected(given, 192**-0.5))
    assert engine.planned == 1


def test_slices_of_tables_and_transposed_queries_are_taken(engine: CpuEngine) -> None:
    q, cache, table, lens = inputs()
    wide = torch.full((3, 9), 2147480000, dtype=torch.int32)
    wide[:, : table.shape[1]] = table
    turned = q.transpose(1, 2).contiguous().transpose(1, 2)
    sliced = wide[:, : table.shape[1]]
    assert not turned.is_contiguous() and not sliced.is_contiguous()
    assert same(call(engine, (turned, cache, sliced, lens)), expected((q, cache, table, lens), 192**-0.5))


# ---------------------------------------------------------------- what engines hand over
def test_a_cache_of_three_dimensions_has_one_latent_a_token(engine: CpuEngine) -> None:
    q, cache, table, lens = given = inputs()
    wanted = expected(given, 192**-0.5)
    assert same(call(engine, (q, cache[:, :, 0], table, lens)), wanted)
    assert same(call(engine, (q, pages_apart(cache)[:, :, 0], table, lens)), wanted)
    assert same(call(engine, given), wanted)
    assert engine.planned == 2, "contiguous, and with pages apart"


@pytest.mark.parametrize("problem", [PROBLEM, PROBLEM.replace(h_kv=2), PROBLEM.replace(page=1)], ids=lambda p: p.label)
def test_pages_may_lie_apart(engine: CpuEngine, problem: MlaProblem) -> None:
    q, cache, table, lens = given = inputs(problem)
    wanted = expected(given, 192**-0.5)
    for apart in (pages_apart(cache), pages_apart(cache, 2, before=1), pages_apart(cache, 2), cache):
        assert same(call(engine, (q, apart, table, lens)), wanted)
    assert engine.planned == 3, "one for each stride"


def test_the_same_pages_apart_are_one_problem() -> None:
    from mla_var3.ops.request import problem_of

    q, cache, table, lens = inputs()
    options: dict[str, Any] = {"head_dim_v": 512, "scale": None, "causal": True}
    plain, apart = (problem_of(q, c, table, lens, **options) for c in (cache, pages_apart(cache)))
    assert not plain.strided_pages and apart == plain.replace(strided_pages=True)
    assert problem_of(q, pages_apart(cache, 3), table, lens, **options) is apart


def test_pages_apart_are_given_to_versions_that_take_them(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("cutlass", reason="nvidia-cutlass-dsl is not installed")
    picked = set()
    for b in (1, 32, 256):
        for h in (8, 16, 64, 128):
            problem = MlaProblem(b=b, h=h, t=4096, strided_pages=True)
            for split in (None, 1024):
                way = ways.way_for(problem, Device.get("h200"), fixed_split=split)
                picked.add(way.key[0].label)
                assert "strided_pages" in way.make(problem, Device.get("h200")).requires.options
    assert picked == {"cute-dsl/flash_mla_v23", "cute-dsl/flash_mla_v24"}


def test_pages_apart_that_no_version_takes_are_refused_with_the_reasons() -> None:
    problem = MlaProblem(b=3, h=16, k=64, t=4096, strided_pages=True)
    with pytest.raises(Unsupported, match=r"no version takes .*: the kernel reads contiguous caches; the problem's pa"):
        ways.way_for(problem, Device.get("a100"))


@pytest.mark.parametrize(
    "cache",
    [
        torch.zeros(9, 64, 2, 576, dtype=torch.bfloat16)[:, :, :1],
        torch.zeros(9, 64, 2, 576, dtype=torch.bfloat16)[:, ::2],
        torch.zeros(9, 64, 1, 640, dtype=torch.bfloat16)[..., :576],
        torch.zeros(9, 2, 64, 576, dtype=torch.bfloat16).transpose(1, 2),
        torch.zeros(9, 576, 64, dtype=torch.bfloat16).transpose(1, 2),
        torch.zeros(1, 64, 1, 576, dtype=torch.bfloat16).expand(9, -1, -1, -1),
        torch.zeros(9 * 64 * 580, dtype=torch.bfloat16).as_strided((9, 64, 1, 576), (64 * 576 + 4, 576, 576, 1)),
        torch.zeros(9 * 64 * 580, dtype=torch.bfloat16).as_strided((9, 64, 1, 576), (64 * 288, 576, 576, 1)),
    ],
    ids=["heads", "tokens", "columns", "heads first", "columns first", "one page", "8 bytes", "overlapping"],
)
def test_other_strides_of_a_cache_are_refused(engine: CpuEngine, cache: Any) -> None:
    with pytest.raises(
        UserError, match=r"^kv_cache is not contiguous \(strides .* only its pages may lie further apart"
    ):
        call(engine, changed(kv_cache=cache))


@pytest.mark.parametrize("names", [("page_table",), ("seq_lens",), ("page_table", "seq_lens")])
def test_tables_and_lengths_of_64_bits_are_taken(engine: CpuEngine, names: tuple[str, ...]) -> None:
    given = inputs()
    wanted = expected(given, 192**-0.5)
    call(engine, given)
    for seed in (0, 1):
        q, cache, table, lens = given = inputs(seed=seed)
        wanted = expected(given, 192**-0.5)
        long = {"page_table": table.long(), "seq_lens": lens.long()}
        found = call(
            engine, (q, cache, *(long[n] if n in names else x for n, x in zip(long, (table, lens), strict=True)))
        )
        assert same(found, wanted)
    assert engine.planned == 1


def test_a_wide_table_of_64_bits_is_narrowed_row_by_row(engine: CpuEngine) -> None:
    q, cache, table, lens = given = inputs()
    wide = torch.full((3, 9), -1, dtype=torch.int64)
    wide[:, : table.shape[1]] = table
    turned = wide.t().contiguous().t()
    for each in (wide, wide[:, : table.shape[1]], turned):
        assert same(call(engine, (q, cache, each, lens.long())), expected(given, 192**-0.5))


def test_a_common_call_makes_no_tensors_of_its_inputs(engine: CpuEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """int32, contiguous, four dimensions: what the kernel is given are the caller's tensors."""
    seen: list[Any] = []
    monkeypatch.setattr(CpuEngine, "run", lambda self, way, problem, given, results, *_: seen.extend(given))
    given = inputs()
    call(engine, given)
    assert seen[2] is given[2] and seen[3] is given[3]
    assert [x.data_ptr() for x in seen] == [x.data_ptr() for x in given]
    assert seen[1].shape == given[1].shape and seen[1].stride() == given[1].stride()


@pytest.mark.parametrize("columns", [576, 656, 584])
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.uint8, torch.float8_e5m2])
def test_caches_of_8_bits_are_refused_as_such(engine: CpuEngine, dtype: Any, columns: int) -> None:
    for cache in (torch.zeros(9, 64, 1, columns, dtype=dtype), torch.zeros(9, 64, columns, dtype=dtype)):
        with pytest.raises(
            UserError, match=r"mla_decode takes torch.bfloat16 and .*, so call packed_mla_decode for packed FP8 caches"
        ):
            call(engine, changed(kv_cache=cache))


@pytest.mark.parametrize(("k", "p"), [(512, 0), (256, 64), (256, 32)])
def test_other_widths_are_computed_where_a_version_takes_them(engine: CpuEngine, k: int, p: int) -> None:
    problem = PROBLEM.replace(k=k, p=p)
    given = make_inputs(problem, "cpu", dist="normal")
    found = call(engine, given, head_dim_v=k)
    out, lse = mla_decode_reference(*given, k=k, scale=(128 + p) ** -0.5, causal=True)
    assert same(found, (out.to(given[0].dtype), lse.float()))


def test_an_empty_batch_gives_empty_results(engine: CpuEngine) -> None:
    q, cache, table, lens = inputs()
    out, lse = call(engine, (q[:0], cache, table[:0], lens[:0]))
    assert out.shape == (0, 2, 4, 512) and lse.shape == (0, 4, 2) and engine.planned == 0


def test_inference_mode_and_the_ordinary_one_may_alternate(engine: CpuEngine) -> None:
    given = inputs()
    wanted = expected(given, 192**-0.5)
    with torch.inference_mode():
        assert same(call(engine, inputs()), wanted)
    assert same(call(engine, given), wanted)
    with torch.inference_mode():
        assert same(call(engine, given), wanted)
    assert engine.planned == 1


def test_a_mask_over_a_single_query_token_is_no_mask() -> None:
    q, cache, table, lens = inputs(MlaProblem(b=2, h=4, t=1, lengths=[5, 70]))
    engine = CpuEngine()
    for causal in (True, False):
        assert same(call(engine, (q, cache, table, lens), causal=causal), expected((q, cache, table, lens), 192**-0.5))
    assert engine.planned == 1


def test_threads_share_a_kernel_one_after_the_other(engine: CpuEngine) -> None:
    sets = [inputs(seed=i) for i in range(4)]
    wanted = [expected(given, 192**-0.5) for given in sets]
    right: list[int] = []

    def work(i: int) -> None:
        for _ in range(5):
            if same(call(engine, sets[i]), wanted[i]):
                right.append(i)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(right) == sorted([0, 1, 2, 3] * 5)


def test_a_kernel_that_keeps_views_is_bound_again(engine: CpuEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """cuTile's kernels hold views of their tensors: pointing the tensors elsewhere would not reach them."""
    monkeypatch.setattr(engine_module, "follows_tensors", lambda kernel: False)
    sets = [inputs(seed=i) for i in range(2)]
    for given in sets:
        assert same(call(engine, given), expected(given, 192**-0.5))


# ---------------------------------------------------------------- streams, captures, memory
def test_streams_do_not_share_a_kernel(engine: CpuEngine) -> None:
    given = inputs()
    for stream in (1, 2, 1, 2):
        engine.current_stream = stream
        call(engine, given)
    assert engine.planned == 2


def test_a_capture_needs_a_call_before_it(engine: CpuEngine) -> None:
    given = inputs()
    engine.current_capture = 5
    with pytest.raises(UserError, match="call once before the capture, with the same shapes"):
        call(engine, given)
    engine.current_capture = None
    call(engine, given)
    engine.current_capture = 5
    assert same(call(engine, given), expected(given, 192**-0.5))


def test_captures_have_kernels_of_their_own(engine: CpuEngine) -> None:
    """Workspaces of a capture lie in the graph's memory: nothing outside of it, and no other graph, may use them."""
    given = inputs()
    call(engine, given)
    for capture in (5, 5, 6):
        engine.current_capture = capture
        call(engine, given)
    assert engine.planned == 3
    engine.current_capture = None
    call(engine, given)
    assert engine.planned == 3


def test_an_unknown_capture_keeps_nothing(engine: CpuEngine) -> None:
    given = inputs()
    call(engine, given)
    engine.current_capture = 0
    call(engine, given)
    call(engine, given)
    assert engine.planned == 3 and len(engine._kept) == 1


def test_the_oldest_kernels_go_first() -> None:
    engine = CpuEngine(most_kernels=2)
    shapes = [inputs(MlaProblem(b=b, h=4, t=70)) for b in (1, 2, 3)]
    for given in (shapes[0], shapes[1], shapes[0], shapes[2], shapes[0]):
        call(engine, given, causal=False)
    assert engine.planned == 3
    call(engine, shapes[1], causal=False)
    assert engine.planned == 4


def test_workspaces_are_bounded_by_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = CpuEngine(most_bytes=1)
    plan = CpuEngine._plan

    def heavy(self: CpuEngine, *args: Any) -> Any:
        bound = plan(self, *args)
        bound.bytes = 10
        return bound

    monkeypatch.setattr(CpuEngine, "_plan", heavy)
    for b in (1, 2, 3):
        call(engine, inputs(MlaProblem(b=b, h=4, t=70)), causal=False)
    assert len(engine._kept) == 1


# ---------------------------------------------------------------- refusals
def changed(**tensors: Any) -> tuple[Any, ...]:
    names = ("q", "kv_cache", "page_table", "seq_lens")
    return tuple(tensors.get(name, x) for name, x in zip(names, inputs(), strict=True))


@pytest.mark.parametrize(
    ("tensors", "sentence"),
    [
        ({"q": torch.zeros(3, 4, 576, dtype=torch.bfloat16)}, r"q has 3 dimensions, shape \(3, 4, 576\): pass \(b, s"),
        ({"q": "text"}, "q is a str: pass a torch tensor"),
        ({"q": torch.zeros(3, 2, 4, 576)}, r"q is torch.float32: the kernels compute in torch.bfloat16"),
        ({"kv_cache": torch.zeros(9, 64, 1, 576, dtype=torch.float16)}, "kv_cache is torch.float16 and q torch.bf"),
        ({"page_table": torch.zeros(3, 3)}, "page_table is torch.float32: pass it as torch.int32"),
        ({"seq_lens": torch.zeros(3, dtype=torch.int16)}, "seq_lens is torch.int16: pass it as torch.int32"),
        ({"kv_cache": torch.zeros(9, 576, dtype=torch.bfloat16)}, r"kv_cache has 2 dimensions, .* or without h_kv"),
        (
            {"page_table": torch.zeros(2, 3, dtype=torch.int32)},
            "page_table has 2 rows and seq_lens 3 entries for the 3",
        ),
        ({"page_table": torch.zeros(3, 0, dtype=torch.int32)}, "page_table has no columns"),
        ({"kv_cache": torch.zeros(9, 64, 1, 512, dtype=torch.bfloat16)}, "kv_cache has 512 columns and q 576"),
        ({"kv_cache": torch.zeros(9, 64, 3, 576, dtype=torch.bfloat16)}, "4 query heads do not share 3 latent caches"),
        ({"kv_cache": torch.zeros(9, 1, 64, 576, dtype=torch.bfloat16).transpose(1, 2)}, None),
        ({"seq_lens": torch.zeros(3, dtype=torch.int32, device="meta")}, "seq_lens is on meta and q on cpu"),
    ],
)
def test_wrong_tensors_are_named(engine: CpuEngine, tensors: dict[str, Any], sentence: str | None) -> None:
    given = changed(**tensors)
    if sentence is None:  # one head: the order of heads and tokens makes no difference to strides
        assert given[1].is_contiguous()
        return
    with pytest.raises(UserError, match=sentence):
        call(engine, given)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"head_dim_v": 600}, "head_dim_v = 600 latent columns of 576"),
        ({"out": torch.zeros(1)}, r"out is \(1,\) torch.float32 on cpu: pass \(3, 2, 4, 512\) torch.bfloat16 on cpu"),
        ({"lse": torch.zeros(3, 2, 4)}, r"lse is \(3, 2, 4\) torch.float32 on cpu: pass \(3, 4, 2\)"),
        ({"out": torch.zeros(3, 2, 512, 4, dtype=torch.bfloat16).transpose(2, 3)}, "out has strides .*columns must"),
        ({"fixed_split": 64}, "fixed_split chooses its own version"),
        ({"fixed_split": 0, "kernel": None}, "fixed_split = 0 is not a whole number of KV tiles"),
        ({"kernel": "cute-dsl/flash_mla_v99"}, "no kernel 'cute-dsl/flash_mla_v99'"),
        ({"kernel": 24}, "kernel is a int: pass a version's name"),
        ({"scale": "x"}, "scale is of type str: pass a finite number, or None for its default"),
        ({"scale": float("nan")}, "scale is nan: pass a finite number"),
        ({"scale": torch.tensor(0.1)}, "scale is of type Tensor: pass a finite number"),
        ({"head_dim_v": "512"}, "head_dim_v is a str: pass the latent columns as an int"),
        ({"out": [1.0]}, "out is a list: pass a torch tensor"),
    ],
)
def test_wrong_options_are_named(engine: CpuEngine, options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        call(engine, inputs(), **options)


# ---------------------------------------------------------------- packed queries, trees
PACKED = MlaProblem(h=4, causal=True, lengths=[70, 0, 129], b=3, queries=[5, 1, 2])
TREE = MlaProblem(h=4, s=3, lengths=[70, 2, 129], b=3, tree=True)


def test_packed_queries_are_the_requests_one_by_one(engine: CpuEngine) -> None:
    q, cache, table, lens, offsets = inputs(PACKED)
    out, lse = call(engine, (q, cache, table, lens), cu_seqlens_q=offsets.long())
    assert out.shape == (8, 4, 512) and lse.shape == (8, 4)
    for i in range(3):
        tokens = slice(int(offsets[i]), int(offsets[i + 1]))
        alone, sums = expected((q[tokens][None], cache, table[i : i + 1], lens[i : i + 1]), 192**-0.5)
        assert same((out[tokens], lse[tokens]), (alone[0], sums[0].t()))


def test_a_mask_says_what_a_token_sees_of_the_newest(engine: CpuEngine) -> None:
    q, cache, table, lens, _ = inputs(TREE)
    chain = torch.ones(3, 3, 3, dtype=torch.bool).tril()
    found = call(engine, (q, cache, table, lens), mask=chain, causal=False)
    assert same(found, expected((q, cache, table, lens), 192**-0.5))
    siblings = chain.clone()
    siblings[:, 2, 1] = False  # the last token does not see the one before it
    tree = call(engine, (q, cache, table, lens), mask=siblings, causal=False)
    assert torch.equal(tree[0][:, :2], found[0][:, :2])
    assert all(not torch.equal(tree[0][i, 2], found[0][i, 2]) for i in range(3))


@pytest.mark.parametrize(
    ("problem", "options", "sentence"),
    [
        (PACKED, {"cu_seqlens_q": torch.zeros(3, dtype=torch.int32)}, "cu_seqlens_q has 3 entries for 3 requests"),
        (PACKED, {"cu_seqlens_q": torch.zeros(4)}, "cu_seqlens_q is torch.float32: pass it as torch.int32"),
        (TREE, {"cu_seqlens_q": torch.zeros(4, dtype=torch.int32)}, "q has 4 dimensions, .* with cu_seqlens_q pass"),
        (TREE, {"mask": torch.ones(3, 3, 3)}, r"mask is torch.float32 \(3, 3, 3\): pass torch.bool"),
        (TREE, {"mask": torch.ones(3, 3, 3).bool(), "causal": True}, "leave it or causal out"),
        (PACKED, {"fixed_split": 64, "kernel": None}, "leave it or cu_seqlens_q out"),
    ],
)
def test_wrong_counts_and_masks_are_named(
    engine: CpuEngine, problem: MlaProblem, options: dict[str, Any], sentence: str
) -> None:
    *given, fifth = inputs(problem)
    if "fixed_split" in options:
        options = {**options, "cu_seqlens_q": fifth}
    with pytest.raises(UserError, match=sentence):
        call(engine, tuple(given), **{"causal": problem.causal, **options})


def test_tensors_of_the_host_are_refused() -> None:
    with pytest.raises(UserError, match="q is on cpu: mla_decode runs on an NVIDIA GPU"):
        mla_decode(*inputs())


def test_a_device_without_a_version_is_refused_with_the_reasons(monkeypatch: pytest.MonkeyPatch) -> None:
    only = tuple(k for k in registry.all_kernels() if k.language == "cute-dsl")
    monkeypatch.setattr(registry, "all_kernels", lambda: only)
    problem = MlaProblem(b=7, h=16, k=384, t=4096)
    with pytest.raises(Unsupported, match=r"no version takes b7_s1_h16_t4096_k384_p64 on a100: .*this is sm_80"):
        ways.way_for(problem, Device.get("a100"))
    with pytest.raises(UserError, match="there is no GPU here"):
        ways.way_for(problem, None)


def test_picks_once_for_equal_shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[MlaProblem] = []
    real = ways._pick

    def counted(problem: MlaProblem, device: Device) -> Any:
        seen.append(problem)
        return real(problem, device)

    monkeypatch.setattr(ways, "_pick", counted)
    ways.way_for.cache_clear()
    for _ in range(3):
        ways.way_for(MlaProblem(b=5, h=16, t=640), Device.get("h200"))
    assert len(seen) == 1


def test_compiles_ahead_what_would_be_picked(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[tuple[Any, Device]] = []

    class Empty:
        def __init__(self, problem: MlaProblem) -> None:
            self.problem = problem

        def plan_empty(self) -> Empty:
            return self

        def compile(self, out_dir: Any, device: Device) -> None:
            compiled.append((self.problem, device))

    way = engine_module.Way(("a version",), lambda problem, device: Empty(problem))  # type: ignore[arg-type,return-value]
    monkeypatch.setattr(decode_module, "way_for", functools.partial(lambda *a, **k: way))
    problems = [MlaProblem(b=2, h=16), MlaProblem(b=3, h=16)]
    assert decode_module.compile_for(problems, "h200") == ["a version"] * 2
    assert compiled == [(problem, Device.get("h200")) for problem in problems]


# ---------------------------------------------------------------- sizes
def empty(*shape: int, dtype: Any = torch.int32) -> Any:
    """A tensor of any size that takes no memory: one element, seen everywhere."""
    return torch.empty(1, dtype=dtype).as_strided(shape, (0,) * len(shape))


@pytest.mark.parametrize(
    ("b", "s", "h", "width", "page", "words"),
    [
        (
            1,
            32_768,
            128,
            512,
            64,
            r"q has 32,768 query tokens of 128 heads in a request, .* or pass q packed, with",
        ),
        (2, 1, 4, 1 << 20, 4096, r"page_table has room for 4,294,967,296 tokens of a request"),
        (1 << 17, 1, 4, 1 << 15, 1, r"page_table has 131,072 rows of 32,768 pages, 4,294,967,296 elements"),
        (1 << 21, 1, 1, 1, 64, r"q has 2,097,152 requests: a call takes 1,048,576"),
        (1, 1 << 21, 1, 1, 64, r"q has 2,097,152 query tokens of a request: a call takes 1,048,576"),
        (1 << 20, 64, 64, 1, 1, r"q has 67,108,864 query tokens of 64 heads in all"),
    ],
)
def test_sizes_that_no_version_takes_name_the_argument(
    engine: CpuEngine, b: int, s: int, h: int, width: int, page: int, words: str
) -> None:
    from mla_var3.ops.request import problem_of

    q, cache = empty(b, s, h, 576, dtype=torch.bfloat16), torch.empty(1, page, 1, 576, dtype=torch.bfloat16)
    with pytest.raises(UserError, match=f"^{words}"):
        problem_of(q, cache, empty(b, width), empty(b), head_dim_v=512, scale=None, causal=False)
    assert engine.planned == 0


def test_as_many_query_tokens_are_taken_packed() -> None:
    from mla_var3.ops.request import problem_of

    q, cache = empty(32_768, 128, 576, dtype=torch.bfloat16), torch.empty(1, 64, 1, 576, dtype=torch.bfloat16)
    problem = problem_of(
        q, cache, empty(1, 512), empty(1), head_dim_v=512, scale=None, causal=True, cu_seqlens_q=empty(2)
    )  # fmt: skip
    plan = ways.way_for(problem, Device.get("h200")).make(problem, Device.get("h200"))
    assert plan.supported() and plan.feasible()


def test_a_named_version_without_room_says_so_before_it_plans(engine: CpuEngine) -> None:
    pytest.importorskip("cutlass", reason="nvidia-cutlass-dsl is not installed")
    q, cache = empty(70_000, 1, 128, 576, dtype=torch.bfloat16), torch.empty(1, 64, 1, 576, dtype=torch.bfloat16)
    problem = MlaProblem(b=70_000, t=384)
    way = ways.way_for(problem, Device.get("h200"), kernel="cute-dsl/flash_mla_v23")
    with pytest.raises(UserError, match=r"^the partial results of 70,000 requests and 66 workers, 2,331,796,480 elem"):
        engine._plan(way, problem, (q, cache, empty(70_000, 6), empty(70_000)), None)
