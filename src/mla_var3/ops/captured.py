"""Shapes and lengths of a server's attention calls, written down as workloads of flashinfer-bench and read again.

With the environment variable MLA_VAR3_CAPTURE=DIR every process appends to

    DIR/workloads/<op_type>/<definition>.jsonl                       a call a line: values of the variable axes
    DIR/blob/workloads/<op_type>/<definition>/<uuid>.safetensors     offsets and lengths of its requests

Definitions are flashinfer-bench's own (`mla_paged_decode_h16_ckv512_kpe64_ps64` and so on), with the layout of a packed
cache behind the name. Nothing of what tensors hold is written but lengths: pages are numbered in order. Lengths are
copied to the host without waiting for the device and are written by a later call. While a CUDA graph is captured,
shapes alone are; its replays make no calls. Of calls of equal shapes within `APART_S` the first is written.
"""

from __future__ import annotations

import atexit
import functools
import itertools
import json
import math
import os
import re
import struct
import threading
import time
import uuid
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mla_var3.errors import UserError
from mla_var3.files import read_text, write_whole
from mla_var3.workload.decode import MlaProblem
from mla_var3.workload.prefill import PrefillProblem
from mla_var3.workload.sparse_decode import SparseProblem, input_names

if TYPE_CHECKING:
    import torch

    from mla_var3.workload import Problem

ENVIRONMENT = "MLA_VAR3_CAPTURE"
#: Seconds between calls of equal shapes that are written, calls whose lengths are awaited, and lines of a process.
APART_S, MOST_AWAITED, MOST_LINES = 0.05, 256, 10_000

_PAGED = re.compile(r"mla_paged_(decode|prefill_causal)_h(\d+)_ckv(\d+)_kpe(\d+)_ps(\d+)(?:_(\w+))?")
_SPARSE = re.compile(r"dsa_sparse_attention_h(\d+)_ckv512_kpe64_topk(\d+)_ps(\d+)(?:_(\w+))?")
_RAGGED = re.compile(r"mla_ragged_prefill(_causal)?_h(\d+)_qk(\d+)_vo(\d+)")


# ---------------------------------------------------------------- writing
@functools.cache
def notes() -> Notes | None:
    """Where this process writes its calls; None where nobody asked for it."""
    folder = os.environ.get(ENVIRONMENT)
    return Notes(Path(folder)) if folder else None


class Notes:
    """Calls that are written into a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._last: dict[Any, float] = {}
        self._awaited: deque[tuple[Problem, list[Any], Any]] = deque()
        self._lines = 0
        self._lock = threading.Lock()
        atexit.register(self.flush)

    def note(self, problem: Problem, inputs: Sequence[torch.Tensor], capturing: bool) -> None:
        """Writes a call down, or keeps it until its lengths are on the host."""
        at, now = _lengths_of(problem), time.monotonic()
        with self._lock:
            # Shapes of a capture are written once.
            apart = math.inf if capturing else APART_S
            if at is None or now - self._last.get((problem, capturing), -math.inf) < apart:
                return
            self._last[problem, capturing] = now
            if capturing:
                self._write(problem, None)
                return
        self.flush(wait=False)
        with self._lock:
            if len(self._awaited) < MOST_AWAITED:
                self._awaited.append((problem, *_copied([inputs[i] for i in at])))

    def flush(self, wait: bool = True) -> None:
        """Writes the calls whose lengths have arrived; wait: all of them."""
        with self._lock:
            self._flush(wait)

    def _flush(self, wait: bool) -> None:
        while self._awaited:
            problem, lengths, event = self._awaited[0]
            if event is not None and not event.query():
                if not wait:
                    return
                event.synchronize()
            self._awaited.popleft()
            self._write(problem, [x.tolist() for x in lengths])

    def _write(self, problem: Problem, lengths: list[list[int]] | None) -> None:
        if self._lines >= MOST_LINES:
            return
        import torch

        op_type, name, axes, random, tables = _form(problem, lengths)
        line: dict[str, Any] = {"definition": name, "solution": None, "evaluation": None}
        identity = str(uuid.uuid4())
        place = f"blob/workloads/{op_type}/{name}/{identity}.safetensors"
        inputs: dict[str, Any] = {each: {"type": "random"} for each in random}
        inputs |= {each: {"type": "safetensors", "path": place, "tensor_key": each} for each in tables}
        inputs["sm_scale"] = {"type": "scalar", "value": problem.scale}  # type: ignore[attr-defined]
        line["workload"] = {"uuid": identity, "axes": axes, "inputs": inputs}
        target = self.folder / "workloads" / op_type / f"{name}.jsonl"
        try:
            for each in (target, self.folder / place) if tables else (target,):
                each.parent.mkdir(parents=True, exist_ok=True)
            if tables:
                write_whole(self.folder / place, safetensors({each: torch.tensor(x) for each, x in tables.items()}))
            with target.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")  # of several processes, a line at a time
        except (OSError, UserError):  # a full disk does not stop a server
            self._lines = MOST_LINES
        self._lines += 1


def _lengths_of(problem: Problem) -> tuple[int, ...] | None:
    """Which inputs of a call say how long its requests are; None where calls of its kind are not written."""
    if isinstance(problem, MlaProblem):
        plain = problem.h_kv == 1 and not problem.tree and (problem.causal or problem.s == 1)
        return ((3, 4) if problem.packed else (3,)) if plain else None
    if isinstance(problem, PrefillProblem):
        return (3, 4) if problem.h_kv == problem.h else None
    if isinstance(problem, SparseProblem) and problem.cache.columns == 576 and not problem.extra:
        return (input_names(problem).index("seq_lens"),) if problem.paged else ()
    return None


def _copied(lengths: Sequence[torch.Tensor]) -> tuple[list[torch.Tensor], Any]:
    """Copies on the host, and the event behind which they hold what they should; None for what is there already."""
    import torch

    if not lengths or not lengths[0].is_cuda:
        return [x.clone() for x in lengths], None
    copies = [torch.empty(x.shape, dtype=x.dtype, pin_memory=True).copy_(x, non_blocking=True) for x in lengths]
    event = torch.cuda.Event()
    event.record()
    return copies, event


def _offsets(counts: Sequence[int]) -> list[int]:
    return [0, *itertools.accumulate(counts)]


def _form(
    pd: Problem, lengths: list[list[int]] | None
) -> tuple[str, str, dict[str, int], list[str], dict[str, list[int]]]:
    """(op_type, definition, axes, inputs that are random, tables) of a call."""
    if isinstance(pd, PrefillProblem):
        axes = {"total_q": pd.query_tokens, "total_kv": pd.keys, "len_indptr": pd.b + 1}
        tables = {} if lengths is None else {"qo_indptr": lengths[0], "kv_indptr": lengths[1]}
        causal = "_causal" if pd.causal else ""
        name = f"mla_ragged_prefill{causal}_h{pd.h}_qk{pd.d + pd.p}_vo{pd.d}"
        return "mla_ragged", name, axes, ["q", "k", "v"], tables
    if isinstance(pd, SparseProblem) and not pd.paged:
        layout = "" if pd.layout == "bf16" else f"_{pd.layout}"
        name = f"dsa_sparse_attention_h{pd.h}_ckv512_kpe64_topk{pd.topk}_ps{pd.page}{layout}"
        axes = {"num_tokens": pd.b * pd.s, "num_pages": max(1, pd.b * pd.t // pd.page)}
        return "dsa_paged", name, axes, ["q_nope", "q_pe", "ckv_cache", "kpe_cache", "sparse_indices"], {}
    assert isinstance(pd, MlaProblem | SparseProblem)
    k, p = (pd.k, pd.p) if isinstance(pd, MlaProblem) else (512, 64)
    page = pd.page_size if isinstance(pd, MlaProblem) else pd.page
    one = pd.s == 1 and not getattr(pd, "packed", False)
    kind, layout = "decode" if one else "prefill_causal", f"_{pd.layout}" if isinstance(pd, SparseProblem) else ""
    tokens = [pd.t] * pd.b if lengths is None else lengths[0]
    pages = [-(-length // page) for length in tokens]
    axes = {"num_pages": max(1, sum(pages)), "len_indptr": pd.b + 1, "num_kv_indices": sum(pages)}
    tables = {}
    if lengths is not None:
        last = [length - page * (count - 1) if count else 0 for length, count in zip(tokens, pages, strict=True)]
        tables = {"kv_indptr": _offsets(pages), "kv_indices": list(range(sum(pages))), "kv_last_page_len": last}
    if one:
        axes["batch_size"] = pd.b
    else:
        queries = lengths[1] if lengths is not None and len(lengths) > 1 else _offsets([pd.s] * pd.b)
        total = pd.query_tokens if isinstance(pd, MlaProblem) else pd.b * pd.s
        axes["total_q"] = queries[-1] if lengths is not None else total
        if lengths is not None:
            tables["qo_indptr"] = queries
    name = f"mla_paged_{kind}_h{pd.h}_ckv{k}_kpe{p}_ps{page}{layout}"
    return "mla_paged", name, axes, ["q_nope", "q_pe", "ckv_cache", "kpe_cache"], tables


def safetensors(tensors: Mapping[str, torch.Tensor]) -> bytes:
    """Tensors of whole numbers as the bytes of a .safetensors file of int32."""
    header: dict[str, Any] = {}
    data = b""
    for name, tensor in tensors.items():
        some = struct.pack(f"<{tensor.numel()}i", *tensor.flatten().tolist())
        header[name] = {"dtype": "I32", "shape": list(tensor.shape), "data_offsets": [len(data), len(data) + len(some)]}
        data += some
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text + data


# ---------------------------------------------------------------- reading
_GIVE = "give a file or folder that MLA_VAR3_CAPTURE or flashinfer-bench made"


def problems(path: Path) -> list[Problem]:
    """The problems of workloads of flashinfer-bench: of a .jsonl file, or of all below a folder, each once. Their
    definitions are MLA over pages, MLA of prompts, and sparse attention (DSA); others are passed over. Raises
    `UserError` where there are none."""
    files = sorted(path.rglob("*.jsonl")) if path.is_dir() else [path]
    found: dict[Problem, None] = {}
    for file in files:
        for number, line in enumerate(read_text(file).splitlines(), start=1):
            try:
                found.update(dict.fromkeys(_read(json.loads(line), file) if line else ()))
            except (OSError, ValueError, KeyError, TypeError) as error:
                raise UserError(
                    f"{file}, line {number}, is no workload of flashinfer-bench ({type(error).__name__}: {error}): "
                    f"{_GIVE}."
                ) from error
    if not found:
        raise UserError(f"{path} holds no workload of MLA or of sparse attention (DSA) of flashinfer-bench: {_GIVE}.")
    return list(found)


def _read(trace: Mapping[str, Any], file: Path) -> Iterator[Problem]:
    name, workload = str(trace["definition"]), trace["workload"]
    axes = workload["axes"]
    if match := _SPARSE.fullmatch(name):
        h, topk, page = map(int, match.groups()[:3])
        tokens = axes["num_tokens"]
        t = max(1, axes["num_pages"] * page // tokens)
        yield SparseProblem(b=tokens, h=h, topk=topk, page=page, t=t, layout=match[4] or "bf16")
    elif match := _RAGGED.fullmatch(name):
        h, width, v = map(int, match.groups()[1:])
        ends, keys = (_table(workload, file, each) for each in ("qo_indptr", "kv_indptr"))
        b = axes["len_indptr"] - 1
        lengths: Any = {"queries": axes["total_q"], "keys": axes["total_kv"]}
        if ends and keys:
            lengths = [list(pair) for pair in zip(_counts(ends), _counts(keys), strict=True)]
        yield PrefillProblem(b=b, h=h, d=v, p=width - v, causal=bool(match[1]), lengths=lengths)
    elif match := _PAGED.fullmatch(name):
        h, k, p, page = map(int, match.groups()[1:5])
        b = axes["len_indptr"] - 1
        pages, last = (_table(workload, file, each) for each in ("kv_indptr", "kv_last_page_len"))
        counts = _counts(pages) if pages else [axes["num_kv_indices"] // b] * b
        of_last = last or [page] * b
        tokens = [page * count - (page - end if count else 0) for count, end in zip(counts, of_last, strict=True)]
        queries: Any = None
        if match[1] != "decode":
            offsets = _table(workload, file, "qo_indptr")
            queries = _counts(offsets) if offsets else {"total": axes["total_q"]}
        if match[6]:
            s = max(1, axes.get("total_q", b) // b)
            yield SparseProblem(b=b, s=s, h=h, page=page, t=max(1, *tokens), layout=match[6], paged=True)
            return
        sizes = {"b": b, "h": h, "k": k, "p": p, "page": page, "t": max(1, *tokens), "lengths": tokens}
        if isinstance(queries, list) and len(set(queries)) == 1:
            yield MlaProblem(**sizes, s=queries[0], causal=queries[0] > 1)
        else:
            yield MlaProblem(**sizes, queries=queries, causal=queries is not None)


def _counts(offsets: Sequence[int]) -> list[int]:
    return [end - begin for begin, end in itertools.pairwise(offsets)]


def _table(workload: Mapping[str, Any], file: Path, name: str) -> list[int] | None:
    """Whole numbers of an input that lies in a .safetensors file; None where it does not. Its path is that of a folder
    above the workload's."""
    spec = workload["inputs"].get(name, {})
    if spec.get("type") != "safetensors":
        return None
    at = next((folder / spec["path"] for folder in file.parents if (folder / spec["path"]).is_file()), None)
    if at is None:
        raise UserError(f"{spec['path']}, which {file} names, is not there: copy the folder blob as well.")
    data = at.read_bytes()
    (size,) = struct.unpack_from("<Q", data)
    entry = json.loads(data[8 : 8 + size])[spec.get("tensor_key", name)]
    begin, end = (8 + size + place for place in entry["data_offsets"])
    kind, width = {"I32": ("i", 4), "I64": ("q", 8)}[entry["dtype"]]
    return list(struct.unpack(f"<{(end - begin) // width}{kind}", data[begin:end]))
