"""`mla_chunk_prefill` on a GPU: both ways, cut prefixes, and a graph whose lengths change."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from chunk_cases import Given, Sizes, close  # noqa: E402

from mla_var3.device import Device  # noqa: E402
from mla_var3.dispatch import choose  # noqa: E402
from mla_var3.errors import Unsupported  # noqa: E402
from mla_var3.kernel import chunks  # noqa: E402
from mla_var3.ops import chunk_prefill, mla_chunk_prefill  # noqa: E402
from mla_var3.workload.prefill import PrefillProblem  # noqa: E402
from running import captured  # noqa: E402

pytestmark = pytest.mark.gpu

REAL = Sizes(h=16, d=128, p=64, k=512, page=64)
REQUESTS = ((130, 130), (64, 700), (0, 65), (1, 1000), (300, 515), (3, 64))


@pytest.mark.parametrize("way", chunk_prefill.WAYS)
@pytest.mark.parametrize("pieces", [1, 3])
def test_both_ways_are_attention_over_decompressed_heads(
    way: str, pieces: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = Given(REQUESTS, sizes=REAL, dtype=torch.bfloat16, device="cuda")
    token = 16 * (192 + 128) * 2
    monkeypatch.setattr(chunks, "PIECE_BYTES", token * -(-(given.prefix + len(given.q)) // pieces))
    options: dict[str, Any] = {"prefix_tokens": given.prefix, "way": way, "return_lse": True}
    found = mla_chunk_prefill(*given.arguments, **options)
    close(found, given.wanted(), 2e-2)
    assert all(map(torch.equal, found, mla_chunk_prefill(*given.arguments, **options)))


@pytest.mark.parametrize("way", chunk_prefill.WAYS)
def test_a_graph_follows_lengths_that_change(way: str) -> None:
    try:
        choose(PrefillProblem(b=2, h=16, causal=True, lengths={"queries": 9, "keys": 9}), Device.detect() or _none())
    except Unsupported as error:
        pytest.skip(str(error))
    # As many query tokens in all, pages of a request and tokens of prefixes.
    first, second = ((130, 130), (64, 700), (4, 900)), ((8, 640), (64, 700), (126, 390))
    given = Given(first, sizes=REAL, dtype=torch.bfloat16, device="cuda")
    options: dict[str, Any] = {"prefix_tokens": 2000, "way": way, "return_lse": True}
    graph, made = captured(lambda: mla_chunk_prefill(*given.arguments, **options))
    for requests in (first, second):
        other = Given(requests, sizes=REAL, dtype=torch.bfloat16, device="cuda", seed=5)
        for old, new in zip(given.arguments, other.arguments, strict=True):
            if old.shape == new.shape:
                old.copy_(new)
            else:  # page tables and caches of fewer pages
                old[tuple(slice(n) for n in new.shape)] = new
        graph.replay()
        close(made, other.wanted(), 2e-2)


def _none() -> Any:
    raise Unsupported("no device of the lab's list is here")
