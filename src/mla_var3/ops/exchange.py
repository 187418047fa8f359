"""How ranks of context-parallel decode pass queries and partials to one another.

`Collective` takes the group's own collectives (NCCL, gloo). `Symmetric` stores into the memory of the other GPUs of one
host, by one kernel for all of them and a barrier behind it. Neither waits for the device.

    queries     every rank's heads to every rank        barrier     decode
    partials    of a rank's heads to that rank          barrier     merge

Two barriers a call are enough for one set of buffers, in replays of a graph too: a rank stores queries of the next call
behind its second barrier, at which every rank's decode has read the last ones, and partials behind the next call's
first, at which every rank has merged. Whatever the shapes of a call, queries are in one half of a buffer and partials
in the other: the next call's queries may come while a slower rank still merges. NVLink's multicast is not used, and
switched off for the allocation.

Two halves of the heads that are under way at once have an exchange each (`halves`), with buffers and barriers of its
own, for which all of this holds by itself. They run on a stream `Beside` the decode.
"""

from __future__ import annotations

import functools
import math
import os
import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

from mla_var3.errors import UserError, nearest

if TYPE_CHECKING:
    import torch

EXCHANGES = ("collective", "symmetric")
_ALIGN = 256  # bytes
_LEAST = 1 << 20  # bytes of a buffer

T = TypeVar("T")

_made: dict[Any, Collective] = {}
_reasons: dict[Any, str] = {}


@dataclass
class Collective:
    """By the collectives of a process group."""

    group: Any
    ranks: int
    rank: int

    def halves(self) -> tuple[Collective, Collective]:
        """Exchanges for two halves of the heads that are under way at once."""
        return self, self

    def queries(self, q: torch.Tensor, k: int) -> torch.Tensor:
        """q (b, s, h, width) of every rank → (b, s, ranks · h, width), contiguous. k: columns that partials will
        have."""
        import torch.distributed as dist

        b, s, h, width = q.shape
        gathered = q.new_empty((self.ranks * b, s, h, width))
        dist.all_gather_into_tensor(gathered, q.contiguous(), group=self.group)
        every = gathered.view(self.ranks, b, s, h, width).permute(1, 2, 0, 3, 4)
        return every.reshape(b, s, self.ranks * h, width)

    def partials(self, out: torch.Tensor, lse: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Of this rank's tokens, out (b, s, ranks · h, k) and lse (b, ranks · h, s) → of this rank's heads,
        (ranks, b, s, h, k) and (ranks, b, s, h)."""
        import torch
        import torch.distributed as dist

        b, s, heads, k = out.shape
        h = heads // self.ranks
        sent = (
            out.view(b, s, self.ranks, h, k).permute(2, 0, 1, 3, 4).contiguous(),
            lse.view(b, self.ranks, h, s).permute(1, 0, 3, 2).contiguous(),
        )
        received = torch.empty_like(sent[0]), torch.empty_like(sent[1])
        for theirs, mine in zip(received, sent, strict=True):
            dist.all_to_all_single(theirs, mine, group=self.group)
        return received


@dataclass
class _Buffer:
    """Memory of this rank that the others store into. peers: (ranks,) int64 on the device, where each one's begins."""

    memory: torch.Tensor
    handle: Any
    peers: torch.Tensor


@dataclass
class Symmetric(Collective):
    """By stores into the memory of the other GPUs of one host. Calls of a group are on one stream.

    held: the last one is in use; smaller ones before it stay, for graphs that hold their addresses. kernel: what Triton
    compiled for the last store. _layout: where out and LSE begin in a buffer, in bytes, behind the queries.
    """

    device: Any = None
    held: list[_Buffer] = field(default_factory=list)
    kernel: Any = None
    _layout: tuple[int, int] = (0, 0)
    _second: Symmetric | None = None

    def halves(self) -> tuple[Symmetric, Symmetric]:
        if self._second is None:
            self._second = Symmetric(self.group, self.ranks, self.rank, self.device)
        return self, self._second

    def queries(self, q: torch.Tensor, k: int) -> torch.Tensor:
        b, s, h, width = q.shape
        if h * width % 2 or h * k % 2:
            raise UserError(
                f"{h} heads of {width} and {k} columns are no whole words of 4 bytes: exchange collectively."
            )
        rows, every = b * s, self.ranks * h
        out_bytes = _up(rows * every * k * q.element_size())
        self._reserve(max(rows * every * width * q.element_size(), out_bytes + rows * every * 4))
        half = self.held[-1].memory.numel() // 2
        self._layout = (half, half + out_bytes)
        words = h * width // 2
        self._put((q.contiguous(), words, words, 0, self.rank * words, self.ranks * words), None, rows)
        return self._view(0, (b, s, every, width), q.dtype)

    def partials(self, out: torch.Tensor, lse: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        import torch

        b, s, heads, k = out.shape
        h, rows = heads // self.ranks, b * s
        out_at, lse_at = self._layout
        words = h * k // 2
        self._put(
            (out, words, self.ranks * words, words, out_at // 4 + self.rank * rows * words, words),
            (lse.transpose(1, 2).contiguous(), h, heads, h, lse_at // 4 + self.rank * rows * h, h),
            rows,
        )
        shape = (self.ranks, b, s, h)
        return self._view(out_at, (*shape, k), out.dtype), self._view(lse_at, shape, torch.float32)

    def _put(self, first: Any, second: Any, rows: int) -> None:
        from mla_var3.ops import peer_store

        buffer = self.held[-1]
        self.kernel = peer_store.put(buffer.peers, self.rank, rows, first, second)
        buffer.handle.barrier(channel=0)

    def _view(self, at: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        size = math.prod(shape) * dtype.itemsize
        return self.held[-1].memory[at : at + size].view(dtype).view(shape)

    def _reserve(self, half: int) -> None:
        """A buffer with halves of at least so many bytes; every rank asks for the same ones in the same order."""
        if self.held and self.held[-1].memory.numel() >= 2 * half:
            return
        import torch
        import torch.distributed._symmetric_memory as symmetric

        if torch.cuda.is_current_stream_capturing():
            raise UserError(
                "a graph is being captured and nothing as large was exchanged before: call once before the capture, "
                "with the same shapes."
            )
        memory = symmetric.empty(max(_LEAST, 2 << (half - 1).bit_length()), dtype=torch.uint8, device=self.device)
        handle = symmetric.rendezvous(memory, self.group)
        offset = memory.data_ptr() - handle.buffer_ptrs[self.rank]  # the same on every rank
        peers = torch.tensor([p + offset for p in handle.buffer_ptrs], dtype=torch.int64, device=self.device)
        self.held.append(_Buffer(memory, handle, peers))


class Beside:
    """What runs beside a stream of a GPU: a second stream, of higher priority. On a CPU it is a thread."""

    def __init__(self, device: torch.device) -> None:
        import torch

        self.device = device
        cuda = device.type == "cuda"
        self.lane: Any = torch.cuda.Stream(device, priority=-1) if cuda else ThreadPoolExecutor(max_workers=1)

    @classmethod
    def of(cls, device: torch.device) -> Beside:
        """The one of a device's current stream."""
        import torch

        return _beside(device, torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0)

    def start(self, work: Callable[..., T], *given: Any) -> Callable[[], T]:
        """Starts work(*given) behind what is in the current stream and what was started before. The returned function
        gives its result, for which the current stream waits, and the host does not."""
        import torch

        if isinstance(self.lane, ThreadPoolExecutor):
            return self.lane.submit(work, *given).result
        self.lane.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.lane):
            made = work(*given)
            done = self.lane.record_event()

        def wait() -> T:
            torch.cuda.current_stream(self.device).wait_event(done)
            return made

        return wait


@functools.cache
def _beside(device: torch.device, stream: int) -> Beside:
    return Beside(device)


def exchange_of(wanted: str | Collective | None, group: Any, q: torch.Tensor) -> Collective:
    """The exchange of a group, made at its first call, which every rank makes. wanted: of `EXCHANGES`; None: symmetric
    where the group's GPUs can store into one another, else collective."""
    import torch.distributed as dist

    if isinstance(wanted, Collective):
        return wanted
    if wanted not in (None, *EXCHANGES):
        raise UserError(f"exchange {wanted!r} is unknown: {nearest(str(wanted), EXCHANGES)}.")
    group = dist.group.WORLD if group is None else group
    ranks, rank = dist.get_world_size(group), dist.get_rank(group)
    if wanted != "collective":
        reason = _why_not(group, q.device)
        if not reason:
            os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
            return _made.setdefault((group, q.device), Symmetric(group, ranks, rank, q.device))
        if wanted is not None:
            raise UserError(f'exchange = "symmetric" is not possible here, {reason}: take "collective".')
    return Collective(group, ranks, rank)


def _why_not(group: Any, device: torch.device) -> str:
    """Why the ranks of a group cannot store into one another's memory; "" where they can. Asks them once."""
    import torch
    import torch.distributed as dist

    if device.type != "cuda":
        return "for it is for GPUs"
    if (group, device) not in _reasons:
        seen: list[Any] = [None] * dist.get_world_size(group)
        index = device.index
        dist.all_gather_object(seen, (socket.gethostname(), index), group=group)
        others = [i for host, i in seen if i != index]
        if len({host for host, _ in seen}) > 1:
            mine = "for ranks are on several hosts"
        elif len({i for _, i in seen}) < len(seen):
            mine = "for ranks share a GPU, or each sees only its own"
        elif not all(torch.cuda.can_device_access_peer(index, i) for i in others):
            mine = "for the GPUs cannot access one another's memory"
        else:
            mine = ""
        reasons: list[Any] = [None] * len(seen)
        dist.all_gather_object(reasons, mine, group=group)
        _reasons[group, device] = next((reason for reason in reasons if reason), "")
    return _reasons[group, device]


def _up(size: int) -> int:
    return -(-size // _ALIGN) * _ALIGN
