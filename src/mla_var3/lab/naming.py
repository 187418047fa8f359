"""How people meet a problem: its name in tables, its place in a list and on the map, its sizes in words, and the
options of a command line that say it.

`mla_var3.workload` has what is computed, and `Problem.label`, by which records and files know a problem. `NAMING` has a
row for each workload of which there is more to say than the values of its fields; one without a row is shown by these.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from mla_var3.errors import UserError
from mla_var3.packed_cache import LAYOUTS
from mla_var3.workload import DEFAULT, MOST_LISTED, Problem
from mla_var3.workload.decode import MlaProblem
from mla_var3.workload.gemm import SIDES

#: Most query tokens of a request that count as decoding; speculation adds a few to one.
DECODE_TOKENS = 64

#: Fields of a problem that are options under their own names, with what the help says of them. Each is a whole number.
SIZES = {
    "b": "requests",
    "s": "query tokens of each request",
    "t": "cached tokens of each request",
    "h": "query heads",
    "h_kv": "latent caches, or heads of keys",
    "k": "latent columns",
    "p": "rope columns",
    "d": "head dim",
    "n": "tokens of each request that are decompressed (design mla_var6_plus)",
}


# ---------------------------------------------------------------- for any problem
def detail(problem: Problem) -> str:
    """What `label` leaves out and two different problems may differ in, each word behind an underscore."""
    return _of(problem).detail(problem)


def cell_name(problem: Problem) -> str:
    """A name that tells the problems of a workload apart: the label, with what `detail` of the workload's row adds. A
    workload whose label leaves out a field needs a row with a `detail`; without one the name is the label alone."""
    return problem.label + detail(problem)


def panel(problem: Problem) -> str:
    """The panel of a map that it belongs to: problems of a panel differ in `place` only."""
    return _of(problem).panel(problem)


def place(problem: Problem) -> tuple[int, int]:
    """Where in its panel it stands: (up, to the right)."""
    up, right = _of(problem).place
    return (getattr(problem, up), getattr(problem, right)) if up else (1, 1)


def geometry(problem: Problem) -> str:
    """Widths and layout, for a filter."""
    return _of(problem).geometry(problem)


def phase(problem: Problem) -> str:
    """The part of serving that it belongs to."""
    return _of(problem).phase(problem)


def words(problem: Problem) -> str:
    """The sizes in words."""
    return _of(problem).words(problem)


def listed(problem: Problem) -> tuple[Any, ...]:
    """A key to sort problems of any workloads by: the default workload first, each in its own order."""
    rank = (phase(problem), *_of(problem).rank(problem), cell_name(problem))
    return (problem.workload != DEFAULT, problem.workload, rank)


def options(problem: Problem) -> list[str]:
    """The words of a command line that say this problem: what differs from the default, and how many requests."""
    record, changed = problem.to_record(), _changed(problem, *problem.fields())
    words, others, last = list[str](), list[str](), list[str]()
    for name in problem.fields():
        if (name not in changed and name != "b") or name not in record:
            continue
        value = record[name]
        if name in SIZES or name == "dtype":
            words += [f"--{name}", str(value)]
        elif name == "causal":
            words.append("--causal")
        elif name == "page":
            words += ["--page", "contiguous" if value is None else str(value)]
        elif name == "lengths" and isinstance(value, dict) and "name" in value:
            last = ["--lengths", f"{value['name']}:{value['seed']}"]
        elif name == "lengths" and isinstance(value, list):
            last = ["--lengths", ",".join(str(x) if isinstance(x, int) else ":".join(map(str, x)) for x in value)]
        else:
            others.append(f"{name}={value if isinstance(value, str) else json.dumps(value, separators=(',', ':'))}")
    return [*words, *(["--problem", ",".join(others)] if others else []), *last]


# ---------------------------------------------------------------- a batch in one word
#: Fields that a batch says.
BATCH = ("b", "s", "t", "lengths", "queries")
_SEGMENT = re.compile(r"(\d*)q(\d+)(k?)(?:s(\d+)(k?))?")


def batch_fields(text: Any) -> dict[str, Any]:
    """Fields of a batch in the grammar of vLLM's attention benchmark: segments `COUNTqTOKENSsLENGTH`, joined by `_`.

    COUNT requests (1 where it is left out) of TOKENS query tokens and LENGTH tokens in all, the new ones among them.
    LENGTH left out is a prompt's, as many as TOKENS. `k` behind a number is 1024 times it: `128q1s1k` are 128 requests
    that decode over 1024 tokens, `2q1k_32q1s1k` two prompts beside 32 decodes. Requests that differ become lists,
    `lengths` and `queries`. With several query tokens attention is causal, as it is there. Raises `UserError`.
    """
    example = "write it as 128q1s1k, with `_` between groups of requests that differ"
    groups = []
    for segment in str(text).split("_"):
        match = _SEGMENT.fullmatch(segment)
        if match is None:
            raise UserError(f"batch {text!r}: {segment!r} is not [COUNT]qTOKENS[sLENGTH]: {example}.")
        count, tokens, length = (int(n) if n else None for n in match.group(1, 2, 4))
        tokens = (tokens or 0) * (1024 if match[3] else 1)
        length = tokens if length is None else length * (1024 if match[5] else 1)
        count = 1 if count is None else count
        if not count or not tokens:
            raise UserError(f"batch {text!r}: {segment!r} has no {'query tokens' if count else 'requests'}: {example}.")
        if tokens > length:
            raise UserError(
                f"batch {text!r}: {segment!r} has {tokens} query tokens and a sequence of {length}, which counts them: "
                "give a sequence that is as long."
            )
        groups.append((count, tokens, length))
    b = sum(count for count, *_ in groups)
    s, t = (max(group[i] for group in groups) for i in (1, 2))
    fields: dict[str, Any] = {"b": b, "s": s, "t": t, **({"causal": True} if s > 1 else {})}
    if b > MOST_LISTED and len(groups) > 1:
        raise UserError(f"batch {text!r} lists {b:,} requests: give at most {MOST_LISTED:,}.")
    if len({tokens for _, tokens, _ in groups}) > 1:
        fields["queries"] = [tokens for count, tokens, _ in groups for _ in range(count)]
    if len({length for *_, length in groups}) > 1:
        fields["lengths"] = [length for count, _, length in groups for _ in range(count)]
    return fields


def with_batch(fields: Mapping[str, Any], kind: type[Problem] | None = None) -> dict[str, Any]:
    """Fields of a problem with what their `batch` says in its place; without one as they are.

    kind: of the problem. One without a field for query tokens takes one a request, one without cached tokens prompts;
    other fields that it lacks, and fields that the batch says too, are a `UserError`.
    """
    if "batch" not in fields:
        return dict(fields)
    others = {name: value for name, value in fields.items() if name != "batch"}
    if twice := [name for name in BATCH if name in others]:
        raise UserError(f"batch {fields['batch']!r} says {', '.join(BATCH)}: leave {' and '.join(twice)} out.")
    said = batch_fields(fields["batch"])
    if kind is not None:
        known = kind.fields()
        if "t" not in known and said["s"] == said["t"] and "lengths" not in said:
            del said["t"]
        if "s" not in known and said["s"] == 1:
            del said["s"]
        if "causal" not in known:
            said.pop("causal", None)
        if lacking := [name for name in said if name not in known]:
            names = {
                "b": "requests",
                "s": "several query tokens",
                "t": "cached tokens",
                "queries": "query tokens that differ",
            }
            what = ", ".join(names.get(name, name) for name in lacking)
            raise UserError(
                f"batch {fields['batch']!r}: workload {kind.workload} does not take {what}: give its own fields."
            )
        if "lengths" in said and "queries" not in known:
            raise UserError(
                f"batch {fields['batch']!r}: workload {kind.workload} takes no list of lengths: give requests alike."
            )
    return {**said, **others}


def model_dims(model: Mapping[str, Any], kind: type[Problem]) -> dict[str, Any]:
    """What a file of conf/model says of the fields of a problem. Its h_kv counts latent caches: of a problem without
    latents every head has its own keys."""
    known = kind.fields()
    return {name: x for name, x in model.items() if name in known and (name != "h_kv" or "k" in known)}


# ---------------------------------------------------------------- the table
def _plain(problem: Problem) -> str:
    return ", ".join(f"{name} = {value}" for name, value in problem.to_record().items() if name != "workload")


@dataclass(frozen=True)
class Naming:
    """A row: functions of a problem, as the functions of these names above have them. place: two fields, up and to the
    right. rank: what comes before the name in a list."""

    words: Callable[[Any], str] = _plain
    geometry: Callable[[Any], str] = lambda p: p.workload
    panel: Callable[[Any], str] = lambda p: p.workload
    place: tuple[str, str] = ("", "")
    rank: Callable[[Any], tuple[Any, ...]] = lambda p: ()
    detail: Callable[[Any], str] = lambda p: ""
    phase: Callable[[Any], str] = lambda p: p.workload


def _of(problem: Problem) -> Naming:
    return NAMING.get(problem.workload, Naming())


def _count(number: int, what: str) -> str:
    """ "1 request", "2 requests"."""
    return f"{number} {what}{'' if number == 1 else 's'}"


def _changed(problem: Problem, *names: str) -> dict[str, Any]:
    """Those of the fields that differ from the default problem's."""
    default = type(problem)()
    return {name: value for name in names if (value := getattr(problem, name)) != getattr(default, name)}


def _left_out(*names: str) -> Callable[[Any], str]:
    """`detail` of a workload whose label leaves out these fields."""

    def detail(p: Problem) -> str:
        return "".join(
            f"_{name}" if value is True else f"_{name}{value}" for name, value in _changed(p, *names).items()
        )

    return detail


def _panel(what: Callable[[Any], str]) -> Callable[[Any], str]:
    """`panel`: the text, then what is unusual."""
    return lambda p: what(p) + ("" if p.dtype == "bf16" else f", {p.dtype}") + detail(p).replace("_", " ")


def _unusual(p: Any) -> str:
    """What stands in the name of a problem of requests behind their sizes."""
    found = cell_name(p).removeprefix(f"b{p.b}_s{p.s}_h{p.h}_t{p.t}").strip("_").replace("_", " ")
    return f", {found}" if found else ""


def _digest(value: Any) -> str:
    return "_" + hashlib.sha256(str(value).encode()).hexdigest()[:4]


def _decode_detail(p: MlaProblem) -> str:
    text = ("_strided" if p.strided_pages else "") + (_digest(p.query_lens) if p.packed else "")
    text += ("_apart" if p.strided else "") + ("_outapart" if p.strided_out else "")
    text += _left_out("d", "softmax_scale")(p)
    return text + ("" if p.lengths == "uniform" else _digest(json.dumps(p.to_record()["lengths"], sort_keys=True)))


def _decode_words(p: MlaProblem) -> str:
    text = f"{_count(p.b, 'request')} of {_count(p.t, 'cached token')}, {_count(p.s, 'query token')}"
    text += f", {_count(p.h, 'head')}"
    text += f" on {p.h_kv} caches" if p.h_kv != 1 else ""
    text += ", causal" if p.causal else ""
    text += f" at the most, {p.query_tokens} in all" if p.packed else ", a tree's mask" if p.tree else ""
    text += ", q and page table strided" if p.strided else ""
    text += ", out and lse strided" if p.strided_out else ""
    return text if p.lengths == "uniform" else f"{text}, lengths {json.dumps(p.to_record()['lengths'])[:80]}"


def _decode_geometry(p: MlaProblem) -> str:
    cache = ("contiguous" if p.page is None else f"pages of {p.page}") + (" further apart" if p.strided_pages else "")
    return f"latent {p.k}+{p.p}, {cache}" if p.d == MlaProblem.d else f"latent {p.k}+{p.p}, head dim {p.d}, {cache}"


def _sparse_words(p: Any) -> str:
    text = f"{_count(p.b, 'request')} of {_count(p.s, 'query token')}, {_count(p.h, 'head')}, "
    text += _count(p.t, "cached token") if p.paged else f"{p.topk} of {_count(p.t, 'cached token')}"
    text += f" and {p.extra} of {p.extra_t} of an extra cache" if p.extra else ""
    text += f" in layout {p.extra_layout}" if p.extra_layout else ""
    text += f", contexts {p.contexts}" if p.contexts != "full" else ""
    text += f", missing {p.missing}" if p.missing else ""
    text += f", layout {p.layout}" + (", q and indices strided" if p.strided else "")
    return text + (", out and lse strided" if p.strided_out else "")


def _sparse_panel(p: Any) -> str:
    chosen = "dense" if p.paged else f"top {p.topk}" + (f" + {p.extra}" if p.extra else "")
    chosen += f", contexts {p.contexts}" if p.contexts != "full" else ""
    chosen += f", missing {p.missing}" if p.missing else ""
    flags = ("lengths", "sink", "extra_lengths", "strided", "strided_out")
    chosen += "".join(f", {name}" for name in flags if getattr(p, name))
    layouts = f"{p.layout} + {p.extra_layout}" if p.extra_layout else p.layout
    return f"{layouts}, {p.h} heads × {p.s}, {chosen}"


def _sparse_detail(p: Any) -> str:
    extra = ("extra_t", "extra_page", "extra_lengths", "extra_layout")
    names = ("page", "lengths", "sink", *extra, "softmax_scale", "strided", "strided_out")
    text = _left_out(*(names if p.paged else ("t", *names)))(p)  # a page table's t is in the label
    _, _, seed = p.contexts.partition(":")  # the name in front of it is in the label
    return text + (f"_seed{seed}" if seed else "") + (f"_{p.missing.replace(':', '')}" if p.missing else "")


def _append_words(p: Any) -> str:
    """But the layout."""
    return _count(p.tokens, "token") if p.no_rope else _rope_words(p)


def _rope_words(p: Any) -> str:
    pairs = "interleaved pairs" if p.interleaved else "pairs of halves"
    return f"{_count(p.tokens, 'token')}, {_count(p.h, 'head')}, {pairs}"


def _prefill_words(p: Any) -> str:
    text = f"{_count(p.b, 'prompt')} of {_count(p.s, 'token')}"
    text += f" behind a prefix, {_count(p.t, 'key')}" if p.t > p.s else f", {_count(p.t, 'key')}" if p.t < p.s else ""
    text += f", {_count(p.h, 'head')}" + (f" on {p.h_kv} of keys" if p.grouped else "")
    text += ", causal" if p.causal else ""
    return text if p.uniform else f"{text}, lengths {json.dumps(p.to_record()['lengths'])[:80]}"


def _prefill_detail(p: Any) -> str:
    text = (f"_p{p.p}_d{p.d}" if _changed(p, "p", "d") else "") + _left_out("softmax_scale")(p)
    return text if p.uniform else text + _digest(json.dumps(p.to_record()["lengths"], sort_keys=True))


def _indexer_words(p: Any) -> str:
    text = f"{_count(p.b, 'request')} of {_count(p.s, 'query token')} and {_count(p.t, 'cached token')}"
    text += f", {_count(p.heads, 'head')}" + ("" if p.table else ", keys in order")
    return text if p.lengths == "uniform" else f"{text}, lengths {p.lengths}"


def _indexer_panel(p: Any) -> str:
    text = f"{p.heads} heads × {p.s}, " + ("decode" if p.table else "prefill")
    return text if p.lengths == "uniform" else f"{text}, lengths {p.lengths}"


_OF_ROPE = ("p", "columns", "rest", "page", "positions", "index")

_DECODE = Naming(
    words=_decode_words,
    geometry=_decode_geometry,
    panel=lambda p: f"{p.h} heads × {p.s}{_unusual(p)}",
    place=("b", "t"),
    rank=lambda p: (p.rows, p.h, p.s, p.causal, p.b, p.t),
    detail=_decode_detail,
    phase=lambda p: "decode" if p.s <= DECODE_TOKENS else "prefill",
)

NAMING = {
    "decode": _DECODE,
    "mixed": _DECODE,
    "sparse_decode": Naming(
        words=_sparse_words,
        geometry=lambda p: f"layout {p.layout}, pages of {p.page}",
        panel=_sparse_panel,
        place=("b", "t"),
        rank=lambda p: (
            p.paged, list(LAYOUTS).index(p.layout), p.s * p.h, p.h, p.topk, p.extra, p.b, p.t if p.paged else 0,
        ),
        detail=_sparse_detail,
        phase=lambda p: "decode",
    ),
    "prefill": Naming(
        words=_prefill_words,
        geometry=lambda p: f"heads {p.d + p.p}/{p.d}",
        panel=lambda p: f"{p.h} heads, {'prompt' if p.s == p.t else 'chunk'}{_unusual(p)}",
        place=("b", "s"),
        rank=lambda p: (p.s * p.h, p.h, p.s, p.causal, p.b, p.t),
        detail=_prefill_detail,
    ),
    "chunked_prefill": Naming(
        words=lambda p: f"{_count(p.b, 'chunk')} of {_count(p.s, 'token')} behind a prefix, "
        f"{_count(p.t, 'cached token')}, {_count(p.h, 'head')}"
        + ("" if p.lengths == "uniform" else ", lengths differ"),
        geometry=lambda p: f"latent {p.k}+{p.p}, heads {p.d + p.p}/{p.d}",
        panel=lambda p: f"{p.h} heads, chunk of a cached prompt{_unusual(p)}",
        place=("s", "t"),
        rank=lambda p: (p.h, p.dtype, p.s, p.b, p.t),
        detail=lambda p: _left_out("k", "p", "d", "page")(p)
        + ("" if p.lengths == "uniform" else _digest(json.dumps(p.to_record()["lengths"]))),
    ),
    "layer": Naming(
        words=lambda p: f"{_count(p.b, 'request')} of {_count(p.t, 'cached token')}, {_count(p.h, 'head')}, "
        f"hidden states of {p.hidden} columns",
        geometry=lambda p: f"hidden {p.hidden}, query {p.q_rank}, latent {p.k}+{p.p}",
        panel=_panel(lambda p: f"layer, {p.h} heads" + ("" if p.lengths == "uniform" else ", lengths differ")),
        place=("b", "t"),
        rank=lambda p: (p.h, p.dtype, p.b, p.t),
        detail=_left_out("hidden", "q_rank", "k", "p", "d", "page"),
    ),
    "norm": Naming(
        words=lambda p: f"{_count(p.rows, 'row')} of {p.width}{f' and {p.second}' if p.second else ''} columns"
        + (", with a residual" if p.residual else ""),
        geometry=lambda p: f"rows of {p.width}" + (f" and {p.second}" if p.second else ""),
        panel=_panel(
            lambda p: (f"norms of {p.width} and {p.second}" if p.second else f"norm of {p.width}")
            + (", residual" if p.residual else "")
        ),
        place=("rows", "columns"),
        rank=lambda p: (p.width, p.second, p.residual, p.dtype, p.rows),
        detail=lambda p: (f"_rest{p.rest}" if p.rest else "") + (f"_eps{p.eps:g}" if _changed(p, "eps") else ""),
    ),
    "rope": Naming(
        words=_rope_words,
        geometry=lambda p: f"latent {p.k}, rope {p.p}",
        panel=_panel(lambda p: _rope_words(p).split(", ", 1)[1]),
        place=("tokens", "h"),
        rank=lambda p: (not p.interleaved, p.h, p.dtype, p.tokens),
        detail=_left_out("k", *_OF_ROPE),
    ),
    "packed_append": Naming(
        words=lambda p: f"{_append_words(p)}, layout {p.layout}",
        geometry=lambda p: f"layout {p.layout}",
        panel=_panel(lambda p: ", ".join((*_append_words(p).split(", ")[1:], f"layout {p.layout}"))),
        place=("tokens", "h"),
        rank=lambda p: (list(LAYOUTS).index(p.layout), not p.interleaved, p.h, p.dtype, p.tokens),
        detail=lambda p: _left_out(*(("rest", "page", "index") if p.no_rope else _OF_ROPE))(p)
        + ("" if p.powers else "_scales"),
    ),
    "indexed_append": Naming(
        words=lambda p: f"{_append_words(p)}, layout {p.layout}, and keys of an indexer",
        geometry=lambda p: f"layout {p.layout}, keys of 128",
        panel=_panel(lambda p: ", ".join((*_append_words(p).split(", ")[1:], f"layout {p.layout}", "indexer's keys"))),
        place=("tokens", "h"),
        rank=lambda p: (not p.interleaved, p.interleaved_keys, p.powers_of_keys, p.h, p.tokens),
        detail=lambda p: _left_out(*_OF_ROPE, "rest_of_keys")(p) + ("" if p.powers else "_any"),
    ),
    "gemm": Naming(
        words=lambda p: f"{_count(p.tokens, 'token')}, {_count(p.h, 'head')}, {p.summed} to {p.columns} columns",
        geometry=lambda p: f"heads {p.d}, latent {p.k}",
        panel=_panel(lambda p: "query to latent" if p.side == "q" else "latent to output"),
        place=("tokens", "h"),
        rank=lambda p: (SIDES.index(p.side), p.h, p.dtype, p.tokens),
        detail=_left_out("k", "p", "d", "rest"),
    ),
    "merge": Naming(
        words=lambda p: f"{_count(p.parts, 'part')}, {_count(p.tokens, 'token')}, {_count(p.h, 'head')}",
        geometry=lambda p: f"latent {p.k}",
        panel=_panel(lambda p: f"{p.parts} parts"),
        place=("tokens", "h"),
        rank=lambda p: (p.parts, p.k, p.dtype, p.rows),
        detail=_left_out("k"),
    ),
    "indexer_logits": Naming(
        words=lambda p: f"{_indexer_words(p)}, logits in {p.dtype}",
        geometry=lambda p: "pages of 64" if p.table else "contiguous keys",
        panel=lambda p: f"indexer, {_indexer_panel(p)}, {p.dtype}",
        place=("b", "t"),
        rank=lambda p: (p.table, p.heads, p.s, p.dtype, p.b, p.t),
    ),
    "topk": Naming(
        words=lambda p: f"{p.topk} of {_count(p.t, 'logit')} in {_count(p.rows, 'row')}, {p.dtype}"
        + (f", lengths {p.lengths}" if p.lengths != "uniform" else "") + (", through a page table" if p.table else ""),
        geometry=lambda p: "slots of pages of 64" if p.table else "columns",
        panel=lambda p: f"top {p.topk}, {p.dtype}" + (", slots" if p.table else ""),
        place=("rows", "t"),
        rank=lambda p: (p.topk, p.dtype, p.table, p.rows, p.t),
    ),
    "index_append": Naming(
        words=lambda p: f"{_count(p.tokens, 'token')}, pairs {'interleaved' if p.interleaved else 'of halves'}, scales "
        + ("powers of two" if p.powers else "of any size"),
        geometry=lambda p: "keys of 128",
        panel=lambda p: "append to the index cache" + (", interleaved" if p.interleaved else "")
        + ("" if p.powers else ", any scales"),
        place=("tokens", "rest"),
        rank=lambda p: (p.interleaved, p.powers, p.tokens),
        detail=_left_out("rest", "positions", "index"),
    ),
    "indexer_topk": Naming(
        words=lambda p: f"{_indexer_words(p)}, the {p.topk} best",
        geometry=lambda p: "pages of 64" if p.table else "contiguous keys",
        panel=lambda p: f"indexer's top {p.topk}, {_indexer_panel(p)}",
        place=("b", "t"),
        rank=lambda p: (p.table, p.heads, p.s, p.topk, p.b, p.t),
    ),
}  # fmt: skip
