"""`mla_chunk_prefill` without a GPU: both ways and every cut of a prefix are attention over decompressed heads."""

from __future__ import annotations

import functools
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from chunk_cases import Given, Sizes, close  # noqa: E402
from ops_fakes import serve_on_cpu  # noqa: E402

from mla_var3.errors import UserError  # noqa: E402
from mla_var3.kernel import chunks  # noqa: E402
from mla_var3.ops import absorb_gemm, chunk_prefill, mla_chunk_prefill, mla_decode  # noqa: E402

H, D, P, K, _ = Sizes()


@pytest.mark.parametrize("pieces", [1, 2, 5, 100])
@pytest.mark.parametrize("v", [D, 48, 24])
def test_it_is_attention_over_decompressed_heads(v: int, pieces: int, monkeypatch: pytest.MonkeyPatch) -> None:
    given = Given(v=v)
    token = H * (D + P + v) * 4
    monkeypatch.setattr(chunks, "PIECE_BYTES", token * -(-(given.prefix + len(given.q)) // pieces))
    found = mla_chunk_prefill(*given.arguments, prefix_tokens=given.prefix, return_lse=True)
    close(found, given.wanted())
    assert torch.equal(mla_chunk_prefill(*given.arguments, prefix_tokens=given.prefix), found[0])


def test_the_prefix_may_be_said_to_be_longer_and_the_scale_is_the_callers() -> None:
    given = Given(seed=3)
    for more in (1, 70):
        found = mla_chunk_prefill(*given.arguments, prefix_tokens=given.prefix + more, scale=0.3, return_lse=True)
        close(found, given.wanted(0.3))
    whole = Given(((5, 5), (0, 0), (9, 9)))
    close(mla_chunk_prefill(*whole.arguments, prefix_tokens=0, return_lse=True), whole.wanted())


def test_other_forms_of_the_same_tensors() -> None:
    """int64 lists, a cache of four dimensions, pages that lie apart."""
    given = Given()
    q, cache, table, lens, of_q, kv_b = given.arguments
    want = mla_chunk_prefill(*given.arguments, prefix_tokens=given.prefix)
    apart = torch.stack([cache, torch.full_like(cache, torch.nan)], 1)[:, 0]
    for pages in (cache[:, :, None], apart):
        found = mla_chunk_prefill(q, pages, table.long(), lens.long(), of_q.long(), kv_b, prefix_tokens=given.prefix)
        assert torch.equal(found, want)


def test_absorbing_the_prefix_gives_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    serve_on_cpu(monkeypatch)
    for name, function in (("mla_decode", mla_decode), ("absorb_gemm", absorb_gemm)):
        version = {"mla_decode": "torch/flash_mla", "absorb_gemm": "torch/absorb_gemm"}[name]
        monkeypatch.setattr(chunk_prefill, name, functools.partial(function, kernel=version))
    given = Given(dtype=torch.float16)
    q, cache, table, lens, of_q, kv_b = given.arguments
    close(chunk_prefill.absorbed(q, cache, table, lens, of_q, kv_b, (D + P) ** -0.5), given.wanted(), 4e-3)


def test_the_product_of_another_module_gives_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    given = Given(v=48)
    q, *lists, kv_b = given.arguments
    monkeypatch.setattr(chunks, "PIECE_BYTES", 30 * H * (D + P + 48) * 4)
    found = [
        chunk_prefill.decompressed(q, *lists, project, K, 48, given.prefix, (D + P) ** -0.5)
        for project in (
            functools.partial(chunks.up_project, kv_b),
            chunk_prefill.by_product(lambda x: torch.nn.functional.linear(x, kv_b)),
        )
    ]
    for one in found:
        close(one, given.wanted())


def test_the_way_is_that_of_less_work() -> None:
    """Of one head and one key of a prefix, for so many queries; bytes of the tensors that lie between the kernels."""
    p = 64
    for k, d, v in ((512, 128, 128), (512, 192, 192), (256, 64, 64)):
        moved = 2 * sum(torch.empty(1, n, dtype=torch.bfloat16).nbytes for n in (d + p, v))  # written, and read
        for queries in (1, 60, 170, 230, 250, 4096):
            decompress = 2 * k * (d + v) + chunk_prefill.FLOPS_A_BYTE * moved + queries * 2 * (d + p + v)
            absorb = queries * 2 * (2 * k + p)
            assert chunk_prefill.way_of(queries, k, d, p, v) == ("decompress" if decompress < absorb else "absorb")
    assert [chunk_prefill.way_of(n, 512, 128, 64, 128) for n in (239, 240)] == ["absorb", "decompress"]
    assert chunk_prefill.way_of(1, 64, 64, 8, 64) == "decompress"  # a latent as wide as a key is never more work


def test_no_request_is_looked_at_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    attend = chunk_prefill.mla_prefill
    monkeypatch.setattr(chunk_prefill, "mla_prefill", lambda *a, **o: calls.append(1) or attend(*a, **o))
    given = Given(tuple((3, 3 + i) for i in range(12)))
    close(mla_chunk_prefill(*given.arguments, prefix_tokens=given.prefix, return_lse=True), given.wanted())
    assert len(calls) == 1


GIVEN = Given()


@pytest.mark.parametrize(
    ("place", "value", "options", "words"),
    [
        (0, GIVEN.q[0], {}, r"q is \(3, 48\).*pass \(any, any, any\)"),
        (0, GIVEN.q[..., :16], {}, "kv_cache has 80 columns, kv_b 64 and q 16"),
        (0, GIVEN.q.clone().requires_grad_(), {}, "q requires a gradient"),
        (1, GIVEN.cache.half(), {}, "kv_cache is .* torch.float16 .*: pass"),
        (1, GIVEN.cache[..., :60], {}, "kv_cache has 60 columns, kv_b 64"),
        (2, GIVEN.table.float(), {}, "page_table is .* torch.float32"),
        (3, GIVEN.seq_lens[:-1], {}, r"seq_lens is \(4,\).*pass \(5\)"),
        (4, GIVEN.of_q[:-1], {}, r"cu_seqlens_q is \(5,\).*pass \(6\)"),
        (5, GIVEN.kv_b[:-1], {}, r"kv_b is \(191, 64\) and q has 3 heads of 32 \+ 16 columns"),
        (5, GIVEN.kv_b[:96], {}, r"kv_b is \(96, 64\)"),
        (0, GIVEN.q, {"prefix_tokens": -1}, "prefix_tokens is -1: pass how many"),
        (0, GIVEN.q, {"prefix_tokens": 3.0}, r"prefix_tokens is 3\.0"),
        (0, GIVEN.q, {"way": "both"}, "way = 'both' is unknown"),
        (0, GIVEN.q, {"way": "absorb"}, 'way = "absorb" needs a GPU: leave it out'),
        (0, GIVEN.q, {"scale": "x"}, "scale is of type str"),
    ],
)
def test_what_does_not_fit_is_told_in_one_sentence(place: int, value: Any, options: dict[str, Any], words: str) -> None:
    arguments = [*GIVEN.arguments]
    arguments[place] = value
    with pytest.raises(UserError, match=words) as caught:
        mla_chunk_prefill(*arguments, **{"prefix_tokens": GIVEN.prefix, **options})
    assert "\n" not in str(caught.value)


def test_torch_compile_takes_it_whole() -> None:
    given = Given(((3, 3), (2, 9)))
    call = functools.partial(mla_chunk_prefill, prefix_tokens=given.prefix, return_lse=True)
    found = torch.compile(lambda *x: call(*x), fullgraph=True, backend="aot_eager")(*given.arguments)
    assert all(map(torch.equal, found, call(*given.arguments)))
    operator = torch.ops.mla_var3.mla_chunk_prefill.default
    torch.library.opcheck(operator, given.arguments, {"prefix_tokens": given.prefix, "scale": 0.2})
