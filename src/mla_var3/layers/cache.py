"""The paged latent cache of a model: pages that requests take when they grow, and give back when they leave."""

from __future__ import annotations

import functools
import itertools
import operator
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from mla_var3.errors import UserError

if TYPE_CHECKING:
    import torch

PAGE = 64  # tokens of a page


@dataclass(frozen=True, eq=False)
class Step:
    """Where the new tokens of one step are, for every layer of the model. b requests, whose tokens lie one behind
    another in the order that `LatentCache.extend` was given.

    counts, lengths: per request its new tokens, and its cached tokens with these. page_table (b, width) int32 and
    seq_lens (b,) int32: the same for `mla_var3.ops.mla_decode`. positions (tokens,) int64: of each new token in its
    request. slots (tokens,) int64: its row among all rows of a layer's pages. Tensors are on the cache's device.
    decode: every request has one new token.
    """

    counts: tuple[int, ...]
    lengths: tuple[int, ...]
    page_table: torch.Tensor
    seq_lens: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    decode: bool = field(init=False)
    _parts: dict[tuple[int, ...], tuple[Step, torch.Tensor]] = field(init=False, repr=False, default_factory=dict)

    def __post_init__(self) -> None:
        object.__setattr__(self, "decode", all(count == 1 for count in self.counts))

    @functools.cached_property
    def starts(self) -> list[int]:
        """Where each request's new tokens begin, and the end."""
        return [0, *itertools.accumulate(self.counts)]

    @functools.cached_property
    def offsets(self) -> torch.Tensor:
        """`starts` as (b + 1,) int32 on the device."""
        import torch

        with torch.inference_mode(False):
            return torch.tensor(self.starts, dtype=torch.int32, device=self.seq_lens.device)

    @property
    def prefix_tokens(self) -> int:
        """Tokens of all requests before their new ones."""
        return sum(self.lengths) - sum(self.counts)

    def only(self, requests: tuple[int, ...]) -> tuple[Step, torch.Tensor]:
        """The step of some of its requests, by their numbers from 0, and the places of their new tokens, (tokens,)
        int64; made once for all layers."""
        import torch

        if requests not in self._parts:
            places = [at for i in requests for at in range(self.starts[i], self.starts[i + 1])]
            with torch.inference_mode(False):
                rows = torch.tensor(requests, device=self.seq_lens.device)
                index = torch.tensor(places, device=self.seq_lens.device)
                part = Step(
                    counts=tuple(self.counts[i] for i in requests),
                    lengths=tuple(self.lengths[i] for i in requests),
                    page_table=self.page_table[rows],
                    seq_lens=self.seq_lens[rows],
                    positions=self.positions[index],
                    slots=self.slots[index],
                )
            self._parts[requests] = part, index
        return self._parts[requests]


@dataclass
class _Request:
    row: torch.Tensor  # its row of the page table, (width,) int32 on the host
    length: int = 0
    pages: list[int] = field(default_factory=list)


class LatentCache:
    """Latent and rope columns of every cached token, in pages of 64 tokens.

    pages: (layers, num_pages, 64, columns), of which `pages[i]` is what layer i reads and writes. A request has the
    same pages in every layer. A step:

        step = cache.extend({request: new_tokens, ...})
        for layer, pages in zip(layers, cache.pages): hidden = layer(hidden, pages, step)
    """

    def __init__(
        self,
        layers: int,
        num_pages: int,
        max_tokens: int,
        *,
        columns: int = 576,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        """max_tokens: of the longest request. It is the width of the page table, which so is the same in every step, as
        a captured graph and a planned kernel want it."""
        import torch

        with torch.inference_mode(False):  # else nobody could write them outside of it
            self.pages = torch.empty((layers, num_pages, PAGE, columns), dtype=dtype, device=device)
        self.max_tokens = max_tokens
        self._free = list(reversed(range(num_pages)))
        self._requests: dict[int, _Request] = {}
        self._joined = 0

    @property
    def free_pages(self) -> int:
        """Pages that no request has."""
        return len(self._free)

    def join(self) -> int:
        """A new request without tokens, as a number that no other one has had."""
        import torch

        self._joined += 1
        with torch.inference_mode(False):
            row = torch.zeros(-(-self.max_tokens // PAGE), dtype=torch.int32)
        self._requests[self._joined] = _Request(row)
        return self._joined

    def leave(self, request: int) -> None:
        """Gives the pages of a request back."""
        self._free += reversed(self._request(request).pages)
        del self._requests[request]

    def extend(self, tokens: Mapping[int, int]) -> Step:
        """Makes room for new tokens, so many for each request.

        Raises `UserError`, and changes nothing, where a request is unknown, gets no whole number of tokens or none or
        becomes longer than `max_tokens`, or where pages are too few.
        """
        import torch

        if not isinstance(tokens, Mapping):
            raise UserError(f"tokens is of type {type(tokens).__name__}: pass {{request: number of new tokens, ...}}.")
        if not tokens:
            raise UserError("a step needs at least one request.")
        requests = [self._request(number) for number in tokens]
        counts = [_whole(number, count) for number, count in tokens.items()]
        lengths = [request.length + count for request, count in zip(requests, counts, strict=True)]
        for number, length in zip(tokens, lengths, strict=True):
            if length > self.max_tokens:
                raise UserError(
                    f"request {number} would have {length} tokens in a cache made for {self.max_tokens} each."
                )
        held = [-(-length // PAGE) for length in lengths]
        needed = sum(held) - sum(len(request.pages) for request in requests)
        if needed > len(self._free):
            raise UserError(f"the step needs {needed} pages and {len(self._free)} are free: let a request leave first.")
        free = self._free[len(self._free) - needed :]
        grown: list[list[int]] = []
        positions: list[int] = []
        slots: list[int] = []
        for request, length, count in zip(requests, lengths, held, strict=True):
            new = [free.pop() for _ in range(count - len(request.pages))]
            for at, page in enumerate(new, len(request.pages)):
                request.row[at] = page  # read by nobody before the length says so
            pages = [*request.pages, *new] if new else request.pages
            grown.append(pages)
            span = range(request.length, length)
            positions += span
            slots += [pages[token // PAGE] * PAGE + token % PAGE for token in span]
        device = self.pages.device
        with torch.inference_mode(False):  # else nobody outside of it could copy other steps over this one
            step = Step(
                counts=tuple(counts),
                lengths=tuple(lengths),
                page_table=torch.stack([request.row for request in requests]).to(device),
                seq_lens=torch.tensor(lengths, dtype=torch.int32, device=device),
                positions=torch.tensor(positions, device=device),
                slots=torch.tensor(slots, device=device),
            )
        # Last, since the device may have no memory for the step's tensors.
        del self._free[len(self._free) - needed :]
        for request, length, pages in zip(requests, lengths, grown, strict=True):
            request.length, request.pages = length, pages
        return step

    def _request(self, number: int) -> _Request:
        # True and 1.0 are equal to 1, and would be found in its place.
        if isinstance(number, bool) or not hasattr(number, "__index__") or number not in self._requests:
            raise UserError(f"the cache has no request {number!r}: it has left, or never joined.")
        return self._requests[number]


def _whole(number: int, count: int) -> int:
    """A request's number of new tokens, of any type of integers."""
    try:
        whole = None if isinstance(count, bool) else operator.index(count)
    except TypeError:
        whole = None
    if whole is None:
        raise UserError(f"request {number} gets {count!r} tokens: pass an integer.")
    if whole < 1:
        raise UserError(f"request {number} gets {whole} tokens: leave it out of the step, or give it some.")
    return whole
