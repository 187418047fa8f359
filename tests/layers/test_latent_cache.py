"""`LatentCache`: pages that requests take and give back."""

from __future__ import annotations

import random
import subprocess
import sys
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from mla_var3.errors import UserError  # noqa: E402
from mla_var3.layers import LatentCache, Step  # noqa: E402


def cache(num_pages: int = 4, max_tokens: int = 200) -> LatentCache:
    return LatentCache(2, num_pages, max_tokens, columns=8)


def where(step: Step) -> list[list[int]]:
    """Rows of the cache of every request's tokens, in order, as the page table has them."""
    return [
        [int(row[token // 64]) * 64 + token % 64 for token in range(int(length))]
        for row, length in zip(step.page_table, step.seq_lens, strict=True)
    ]


def test_no_two_tokens_share_a_row_whoever_joins_and_leaves() -> None:
    """Random requests over 12 pages, against a model that remembers where each token was put."""
    rng, served = random.Random(0), cache(12, 200)
    rows: dict[int, list[int]] = {}
    joined = left = refused = 0
    for _ in range(300):
        if rng.random() < 0.3:
            rows[served.join()] = []
            joined += 1
        if rows and rng.random() < 0.25:
            gone = rng.choice(sorted(rows))
            served.leave(gone)
            del rows[gone]
            left += 1
        chosen = rng.sample(sorted(rows), min(len(rows), rng.randint(1, 4)))
        tokens = {request: rng.choice([1, 1, 1, 63, 64, 65, 90]) for request in chosen}
        if not tokens or any(len(rows[r]) + n > 200 for r, n in tokens.items()):
            continue
        needed = sum(-(-(len(rows[r]) + n) // 64) - -(-len(rows[r]) // 64) for r, n in tokens.items())
        if needed > served.free_pages:
            with pytest.raises(UserError, match=f"needs {needed} pages and {served.free_pages} are free"):
                served.extend(tokens)
            refused += 1
            continue
        step = served.extend(tokens)
        new = step.slots.split(list(tokens.values()))
        positions = step.positions.split(list(tokens.values()))
        for request, slots, at, all_rows in zip(tokens, new, positions, where(step), strict=True):
            assert at.tolist() == list(range(len(rows[request]), len(rows[request]) + tokens[request]))
            rows[request] += slots.tolist()
            assert rows[request] == all_rows
        taken = [row for held in rows.values() for row in held]
        assert len(set(taken)) == len(taken) and max(taken) < 12 * 64
        assert served.free_pages == 12 - sum(-(-len(held) // 64) for held in rows.values())
    assert min(joined, left, refused) > 20
    for request in rows:
        served.leave(request)
    assert served.free_pages == 12


def test_a_step_is_what_mla_decode_takes() -> None:
    served = cache()
    first, second = served.join(), served.join()
    prompts = served.extend({first: 65, second: 2})
    assert not prompts.decode and prompts.counts == (65, 2) == prompts.lengths
    step = served.extend({second: 1, first: 1})
    assert step.decode and step.lengths == (3, 66)
    assert step.page_table.dtype == step.seq_lens.dtype == torch.int32
    assert step.page_table.shape == (2, 4), "as wide as the longest request, in every step"
    assert step.seq_lens.tolist() == [3, 66] and step.positions.tolist() == [2, 65]
    assert served.pages.shape == (2, 4, 64, 8) and served.pages.is_contiguous()
    assert prompts.page_table[0, :2].tolist() == [0, 1], "a step keeps what it said"


@pytest.mark.parametrize(
    "tokens, message",
    [
        ({}, "a step needs at least one request."),
        ({1: 0}, "request 1 gets 0 tokens: leave it out of the step, or give it some."),
        ({1: 1, 3: 1}, "the cache has no request 3: it has left, or never joined."),
        ({1: 137}, "request 1 would have 201 tokens in a cache made for 200 each."),
        ({1: 5, 2: 2.0}, "request 2 gets 2.0 tokens: pass an integer."),
        ({1: 5, 2: float("nan")}, "request 2 gets nan tokens: pass an integer."),
        ({1: 5, 2: True}, "request 2 gets True tokens: pass an integer."),
        ({1: 5, 2: False}, "request 2 gets False tokens: pass an integer."),
        ({1: 5, 2: None}, "request 2 gets None tokens: pass an integer."),
        ({1: 5, 2: "5"}, "request 2 gets '5' tokens: pass an integer."),
        ({1: 5, 2: torch.tensor(2.0)}, "request 2 gets tensor(2.) tokens: pass an integer."),
        ({1: 5, 2: torch.tensor([2, 3])}, "request 2 gets tensor([2, 3]) tokens: pass an integer."),
        ({1: 5, 2: -3}, "request 2 gets -3 tokens: leave it out of the step, or give it some."),
        ({1: 5, 2: 2**70}, f"request 2 would have {2**70} tokens in a cache made for 200 each."),
        ({1: 5, 7: 1, 2: 5}, "the cache has no request 7: it has left, or never joined."),
        ({True: 5, 2: 5}, "the cache has no request True: it has left, or never joined."),
        ({1.0: 5, 2: 5}, "the cache has no request 1.0: it has left, or never joined."),
        ({1: 5, "2": 5}, "the cache has no request '2': it has left, or never joined."),
        ([1, 2], "tokens is of type list: pass {request: number of new tokens, ...}."),
        ({1: 70, 2: 120}, "the step needs 4 pages and 3 are free: let a request leave first."),
    ],
)
def test_a_step_that_cannot_be_is_refused_and_changes_nothing(tokens: Any, message: str) -> None:
    served, other = cache(), cache()
    for one in (served, other):
        assert [one.join(), one.join()] == [1, 2]
        one.extend({1: 64})
    with pytest.raises(UserError) as raised:
        served.extend(tokens)
    assert str(raised.value) == message
    assert served.free_pages == 3
    assert_same(served.extend({1: 1, 2: 128}), other.extend({1: 1, 2: 128}))
    assert served.free_pages == 0


def assert_same(step: Step, other: Step) -> None:
    assert (step.counts, step.lengths, step.decode) == (other.counts, other.lengths, other.decode)
    for name in ("page_table", "seq_lens", "positions", "slots"):
        assert torch.equal(getattr(step, name), getattr(other, name)), name


def test_a_step_whose_tensors_find_no_memory_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    served, other = cache(), cache()
    for one in (served, other):
        assert [one.join(), one.join()] == [1, 2]
        one.extend({1: 60})

    def full(*_: Any, **__: Any) -> Any:
        raise torch.OutOfMemoryError("no memory")

    for function in ("stack", "tensor"):
        with monkeypatch.context() as patched:
            patched.setattr(torch, function, full)
            with pytest.raises(torch.OutOfMemoryError):
                served.extend({2: 70, 1: 10})
        assert served.free_pages == 3
    assert_same(served.extend({1: 10, 2: 70}), other.extend({1: 10, 2: 70}))


def test_integers_of_other_libraries_are_taken() -> None:
    numpy = pytest.importorskip("numpy")
    served = cache()
    first, second = served.join(), served.join()
    step = served.extend({first: numpy.int64(3), numpy.int32(second): torch.tensor(1)})
    assert step.counts == (3, 1) and all(type(count) is int for count in step.counts)
    assert served.extend({first: 1, second: 1}).lengths == (4, 2)


def test_a_request_leaves_once() -> None:
    served = cache()
    request = served.join()
    served.leave(request)
    with pytest.raises(UserError, match="the cache has no request 1: it has left, or never joined"):
        served.leave(request)
    assert served.join() == 2


def test_importing_the_room_loads_nothing_heavy() -> None:
    heavy = ("torch", "transformers", "triton", "cutlass", "cuda.tile", "pandas", "pydantic", "hydra", "numpy")
    code = f"import sys, mla_var3.layers; print([m for m in {heavy!r} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"


def test_a_name_that_is_not_there_is_an_attribute_error() -> None:
    import mla_var3.layers

    layers: Any = mla_var3.layers
    with pytest.raises(AttributeError, match=r"'mla_var3.layers' has no attribute 'MlaDecoder'"):
        _ = layers.MlaDecoder
