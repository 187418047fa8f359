"""The largest batches on a GPU: right where a version takes them, refused by name where none does. Some take 40 GB."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from mla_var3.catalogue import registry  # noqa: E402
from mla_var3.errors import Unsupported, UserError  # noqa: E402
from mla_var3.ops import mla_decode, sparse_mla_decode  # noqa: E402
from mla_var3.workload.decode import mla_decode_reference  # noqa: E402

pytestmark = pytest.mark.gpu

REQUESTS, PAGES, WIDTH = 70_000, 512, 6  # a page table of 384 tokens


def memory(gigabytes: int) -> None:
    torch.cuda.empty_cache()
    if torch.cuda.mem_get_info()[0] < gigabytes << 30:
        pytest.skip(f"needs {gigabytes} GB of GPU memory")


def random(*shape: int) -> Any:
    """N(0, 1) in bf16, made in place: a float32 of it would be twice as large."""
    return torch.empty(shape, dtype=torch.bfloat16, device="cuda").normal_()


def right(found: Any, q: Any, cache: Any, table: Any, lens: Any, k: int) -> None:
    """out and lse of a few requests against the oracle, those at both ends and where 16 and 31 bits end among them."""
    out, lse = found
    some = torch.tensor([i for i in (0, 1, 4097, 65_534, 65_535, 65_536, 69_998, 69_999) if i < len(q)], device="cuda")
    want_out, want_lse = mla_decode_reference(
        q[some], cache, table[some], lens[some], k=k, scale=192**-0.5, causal=False
    )  # fmt: skip
    torch.testing.assert_close(out[some].double(), want_out, atol=0.02, rtol=0.02)
    torch.testing.assert_close(lse[some].double(), want_lse, atol=1e-3, rtol=1e-3)


def decoded(q: Any, cache: Any, table: Any, lens: Any, k: int, label: str | None) -> Any:
    if label is not None and (reason := registry.missing(registry.KernelId.parse(label).language)):
        pytest.skip(reason)
    return mla_decode(q, cache, table, lens, head_dim_v=k, scale=192**-0.5, return_lse=True, kernel=label)


def batch(h: int, k: int) -> tuple[Any, ...]:
    generator = torch.Generator("cuda").manual_seed(0)
    table = torch.randint(PAGES, (REQUESTS, WIDTH), device="cuda", dtype=torch.int32, generator=generator)
    lens = torch.randint(WIDTH * 64 + 1, (REQUESTS,), device="cuda", dtype=torch.int32, generator=generator)
    return random(REQUESTS, 1, h, k + 64), random(PAGES, 64, 1, k + 64), table, lens


@pytest.mark.parametrize(
    ("h", "k", "label"),
    [
        (16, 384, None),
        (16, 384, "cute-dsl/flash_mla"),
        (16, 512, None),
        (16, 512, "cute-dsl/flash_mla"),
        (16, 512, "cute-dsl/flash_mla_v23"),
        (16, 512, "cute-dsl/flash_mla_v24"),
        (16, 512, "triton/flash_mla"),
        (128, 512, None),
        (128, 512, "cute-dsl/flash_mla"),
    ],
)
def test_70_000_requests(h: int, k: int, label: str | None) -> None:
    memory(40 if h == 128 else 12)
    given = batch(h, k)
    right(decoded(*given, k, label), *given, k)


@pytest.mark.parametrize(
    ("h", "label", "words"),
    [
        (16, "cutile-dsl/flash_mla", "^70,000 requests of q"),
        (16, "cutile-dsl/flash_mla_v2", "^70,000 requests of q"),
        (128, "cute-dsl/flash_mla_v23", "^the partial results of 70,000 requests"),
    ],
)
def test_a_version_without_room_for_them_says_so(h: int, label: str, words: str) -> None:
    memory(40 if h == 128 else 12)
    with pytest.raises(UserError, match=words):
        decoded(*batch(h, 512), 512, label)


@pytest.mark.parametrize("h", [16, 128])
def test_70_000_requests_of_indices(h: int) -> None:
    """Of one token each: out is its latent."""
    memory(40 if h == 128 else 12)
    q, cache = random(REQUESTS, 1, h, 576), random(PAGES, 64, 576)
    indices = torch.randint(PAGES * 64, (REQUESTS, 1, 1), device="cuda", dtype=torch.int32)
    out = sparse_mla_decode(q, cache, indices, layout="bf16")
    assert isinstance(out, torch.Tensor)
    for first in range(0, REQUESTS, 5000):
        rows = cache.view(-1, 576)[indices[first : first + 5000, 0, 0].long(), None, None, :512]
        assert torch.equal(out[first : first + 5000], rows.expand_as(out[first : first + 5000])), first


# ---------------------------------------------------------------- many query tokens of one request
def one_request(tokens: int) -> tuple[Any, ...]:
    table = torch.arange(2, device="cuda", dtype=torch.int32)[None]
    return random(1, tokens, 128, 576), random(2, 64, 1, 576), table, torch.tensor([100], device="cuda").int()


def right_tokens(out: Any, lse: Any, q: Any, cache: Any, table: Any, lens: Any) -> None:
    """out (tokens, h, 512) and lse (tokens, h) at both ends and around 2^31 elements."""
    tokens = len(q)
    some = [0, 1, tokens // 2, 29_126, 29_127, 29_128, tokens - 2, tokens - 1]
    at = torch.tensor([i for i in some if i < tokens], device="cuda")
    want_out, want_lse = mla_decode_reference(q[at][None], cache, table, lens, k=512, scale=192**-0.5, causal=False)
    torch.testing.assert_close(out[at].double(), want_out[0], atol=0.02, rtol=0.02)
    torch.testing.assert_close(lse[at].double(), want_lse[0].t(), atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("label", [None, "cute-dsl/flash_mla", "cute-dsl/flash_mla_v23", "triton/flash_mla"])
def test_as_many_query_tokens_as_32_bits_count(label: str | None) -> None:
    memory(24)
    given = one_request(29_000)
    out, lse = decoded(*given, 512, label)
    right_tokens(out[0], lse[0].t(), given[0][0], *given[1:])


def test_more_are_refused_and_taken_packed() -> None:
    memory(32)
    q, cache, table, lens = one_request(32_768)
    with pytest.raises(UserError, match=r"^q has 32,768 query tokens of 128 heads in a request, .*, with cu_seqlens_q"):
        mla_decode(q, cache, table, lens)
    for label in (None, "cute-dsl/flash_mla", "triton/flash_mla"):
        with pytest.raises(UserError, match=r"^q has 32,768 query tokens"):
            decoded(q, cache, table, lens, 512, label)
    offsets = torch.tensor([0, 32_768], device="cuda", dtype=torch.int32)
    out, lse = mla_decode(q[0], cache, table, lens, cu_seqlens_q=offsets, return_lse=True)
    right_tokens(out, lse, q[0], cache, table, lens)


# ---------------------------------------------------------------- splits of a fixed length
def test_a_fixed_split_fills_its_workspace_or_is_refused() -> None:
    memory(16)
    width = 2048
    q, cache = random(64, 1, 128, 576), random(PAGES, 64, 1, 576)
    table = torch.randint(PAGES, (64, width), device="cuda", dtype=torch.int32)
    lens = torch.randint(1, 20_000, (64,), device="cuda", dtype=torch.int32)
    lens[0] = lens[63] = width * 64
    try:
        found = mla_decode(q, cache, table, lens, fixed_split=256, scale=192**-0.5, return_lse=True)
    except Unsupported as error:
        pytest.skip(str(error))
    some = torch.tensor([0, 31, 63], device="cuda")
    want_out, want_lse = mla_decode_reference(
        q[some], cache, table[some], lens[some], k=512, scale=192**-0.5, causal=False
    )  # fmt: skip
    torch.testing.assert_close(found[0][some].double(), want_out, atol=0.02, rtol=0.02)
    torch.testing.assert_close(found[1][some].double(), want_lse, atol=1e-3, rtol=1e-3)
    with pytest.raises(UserError, match=r"^fixed_split: splits of 64 tokens, of 64 requests with room for 131,072"):
        mla_decode(q, cache, table, lens, fixed_split=64)
