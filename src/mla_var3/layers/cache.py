"""The paged latent cache of a model: pages that requests take when they grow, and give back when they leave."""

from __future__ import annotations

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
    """

    counts: tuple[int, ...]
    lengths: tuple[int, ...]
    page_table: torch.Tensor
    seq_lens: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor

    @property
    def decode(self) -> bool:
        """Every request has one new token."""
        return all(count == 1 for count in self.counts)


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
        self._requests[self._joined] = _Request(torch.zeros(-(-self.max_tokens // PAGE), dtype=torch.int32))
        return self._joined

    def leave(self, request: int) -> None:
        """Gives the pages of a request back."""
        self._free += reversed(self._request(request).pages)
        del self._requests[request]

    def extend(self, tokens: Mapping[int, int]) -> Step:
        """Makes room for new tokens, so many for each request.

        Raises `UserError`, and changes nothing, where a request is unknown, gets no token or becomes longer than
        `max_tokens`, or where pages are too few.
        """
        import torch

        if not tokens:
            raise UserError("a step needs at least one request.")
        needed = 0
        for number, count in tokens.items():
            request = self._request(number)
            if count < 1:
                raise UserError(f"request {number} gets {count} tokens: leave it out of the step, or give it some.")
            length = request.length + count
            if length > self.max_tokens:
                raise UserError(
                    f"request {number} would have {length} tokens in a cache made for {self.max_tokens} each."
                )
            needed += -(-length // PAGE) - len(request.pages)
        if needed > len(self._free):
            raise UserError(f"the step needs {needed} pages and {len(self._free)} are free: let a request leave first.")
        requests = [self._requests[number] for number in tokens]
        positions: list[int] = []
        slots: list[int] = []
        for request, count in zip(requests, tokens.values(), strict=True):
            new = range(request.length, request.length + count)
            while len(request.pages) * PAGE < new.stop:
                request.row[len(request.pages)] = self._free[-1]
                request.pages.append(self._free.pop())
            positions += new
            slots += [request.pages[token // PAGE] * PAGE + token % PAGE for token in new]
            request.length = new.stop
        lengths = tuple(request.length for request in requests)
        device = self.pages.device
        return Step(
            counts=tuple(tokens.values()),
            lengths=lengths,
            page_table=torch.stack([request.row for request in requests]).to(device),
            seq_lens=torch.tensor(lengths, dtype=torch.int32, device=device),
            positions=torch.tensor(positions, device=device),
            slots=torch.tensor(slots, device=device),
        )

    def _request(self, number: int) -> _Request:
        if number not in self._requests:
            raise UserError(f"the cache has no request {number}: it has left, or never joined.")
        return self._requests[number]
