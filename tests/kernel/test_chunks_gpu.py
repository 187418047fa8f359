"""Merges of a prefix's pieces on a GPU are right in every row of every call, and so is the pipeline that has them."""

from __future__ import annotations

import pytest
from planning import planned, right

from mla_var3.kernel import chunks
from mla_var3.workload.chunked_prefill import ChunkedProblem

pytestmark = pytest.mark.gpu

CALLS = 40


@pytest.mark.parametrize(("n", "h", "d"), [(512, 128, 128), (8192, 16, 128), (1000, 6, 96), (3000, 5, 16)])
def test_a_merge_is_right_in_every_row_of_every_call(n: int, h: int, d: int) -> None:
    """The second part has three quarters of the keys, so that a row that is merged by another LSE is far off."""
    import torch

    torch.manual_seed(1)
    outs = torch.randn(2, n, h, d, device="cuda").bfloat16()
    lse = 8 + torch.randn(h, n, device="cuda") / 8
    apart = torch.empty(h, 2 * n, device="cuda")[:, n:].copy_(lse + 1.1)  # heads lie apart, as those of a split
    parts = (outs[0], lse), (outs[1], apart)
    total = lse.double().logaddexp(apart.double())
    first, second = ((x[1].double() - total).exp().t()[..., None] * x[0].double() for x in parts)
    found = torch.full_like(outs[0], torch.nan), torch.full_like(lse, torch.nan)
    kept = []
    for _ in range(CALLS):
        chunks.merge(*parts, found)
        kept.append(tuple(x.clone() for x in found))
    wanted = first + second
    assert float((kept[0][0] - wanted).abs().max()) < 2.0**-5 and float((kept[0][1] - total).abs().max()) < 1e-5
    assert all(torch.equal(a, b) for call in kept for a, b in zip(call, kept[0], strict=True))


@pytest.mark.parametrize(("h", "tokens"), [(128, 700), (16, 700)])
def test_a_prefix_in_many_pieces(h: int, tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of so many tokens each; attention splits those of 16 heads besides.

    As many merges as a prompt of 128k tokens has. The bound has no room for twice as many: a merge of m parts rounds
    what they have together, of which m / n is in the result of n parts, so that errors are squares that add up to half
    a rounding a merge. The worst row has 9e-6 with one merge, 2.5e-5 with 10 and 4.2e-5 with 24, of 4e-5. Splits are
    not rounded before attention merges them.
    """
    problem = ChunkedProblem(b=1, s=512, t=8192, h=h)
    monkeypatch.setattr(chunks, "PIECE_BYTES", tokens * (2 * problem.d + problem.p) * h * problem.element_bytes)
    assert len(chunks.cut(problem)) == 12
    right(planned("cute-dsl/chunk_decompress", problem), ["own"])


@pytest.mark.parametrize(
    "problem",
    [
        ChunkedProblem(b=1, s=512, t=4608, h=16),
        ChunkedProblem(b=1, s=384, t=16768, h=16),
        ChunkedProblem(b=3, h=4, lengths=((130, 3000), (0, 700), (257, 5000))),
    ],
    ids=lambda x: x.label,
)
def test_few_query_tiles_over_long_prefixes(problem: ChunkedProblem) -> None:
    right(planned("cute-dsl/chunk_decompress", problem))
