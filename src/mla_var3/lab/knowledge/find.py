"""Entries that fit what is known of a kernel: from the index, without reading pages."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mla_var3 import paths
from mla_var3.errors import UserError, nearest
from mla_var3.files import read_text
from mla_var3.lab.knowledge import triggers
from mla_var3.lab.knowledge.triggers import Facts, Match, Trigger

#: Where the package carries the index when it is installed from a wheel.
_SHIPPED = paths.package() / "data" / "knowledge"


@dataclass(frozen=True)
class Found:
    """An entry of the index and how its best trigger agrees with the facts (None: found by words alone). headed: how
    many of the words that were asked for stand in its title."""

    entry: Mapping[str, Any]
    match: Match | None
    headed: int = 0

    @property
    def score(self) -> tuple[int, int]:
        """More conditions that hold first, then fewer that are open."""
        return (len(self.match.held), -len(self.match.open)) if self.match else (0, 0)


def load_index(folder: Path | None = None) -> dict[str, Any]:
    """index.json of a docs/knowledge folder; by default the repository's, else the package's. Raises `UserError`."""
    root = paths.repo_root()
    places = [folder] if folder else [*([root / "docs" / "knowledge"] if root else []), _SHIPPED]
    for place in places:
        path = place / "index.json"
        if path.is_file():
            try:
                return dict(json.loads(read_text(path)))
            except ValueError as error:
                raise UserError(f"{path} is no index: write it anew with mla-var3 knowledge check.") from error
    raise UserError(f"there is no index.json in {places[0]}: write it with mla-var3 knowledge check.")


def find(
    index: Mapping[str, Any],
    facts: Facts | None = None,
    *,
    kind: str | None = None,
    language: str | None = None,
    arch: str | None = None,
    words: Iterable[str] = (),
) -> list[Found]:
    """Entries that no fact contradicts and at least one speaks for, the best first.

    kind: optimization or anti-pattern. language, arch: only entries for it. words: each must stand in the page, which
    of an installed package is its title, summary, keywords and triggers; with words, reference pages are found too, and
    facts may be left out. What has them in its title comes before what has them in its text.
    """
    wanted = [word.lower() for word in words]
    has_facts = facts is not None and (facts.bound is not None or any(facts.groups.values()))
    pool: list[Mapping[str, Any]] = list(index["entries"])
    if wanted and not has_facts:
        pool += index["references"]
    found = []
    for entry in pool:
        languages = entry.get("languages", [entry.get("language")])
        if kind is not None and entry["kind"] != kind:
            continue
        if language is not None and language not in languages and "any" not in languages:
            continue
        if arch is not None and arch not in entry.get("archs", [arch]) and "any" not in entry.get("archs", []):
            continue
        head, text = _texts(entry)
        if not all(word in head or word in text for word in wanted):
            continue
        best = _best(entry.get("applies", []), facts) if facts is not None and has_facts else None
        if has_facts and best is None:
            continue
        found.append(Found(entry, best, sum(word in head for word in wanted)))
    return sorted(found, key=lambda f: (tuple(-n for n in f.score), -f.headed, str(f.entry["path"])))


def loosened(
    index: Mapping[str, Any], facts: Facts | None = None, *, words: Sequence[str], **options: Any
) -> list[Found]:
    """As `find`, for words that no page has all of: what has the most of them."""
    most: dict[str, tuple[int, Found]] = {}
    for word in words:
        for one in find(index, facts, words=[word], **options):
            path = str(one.entry["path"])
            most[path] = (most[path][0] + 1 if path in most else 1, one)
    top = max((count for count, _ in most.values()), default=0)
    return [one for count, one in most.values() if count == top]


def _texts(entry: Mapping[str, Any]) -> tuple[str, str]:
    """(title, everything else that is written) of an entry, in small letters."""
    triggers_ = [condition["name"] for one in entry.get("applies", []) for condition in one["conditions"]]
    said = [entry["summary"], entry["path"], *entry.get("keywords", []), *triggers_]
    root = paths.repo_root()
    if root is not None and (page := root / "docs" / "knowledge" / entry["path"]).is_file():
        said.append(page.read_text(encoding="utf-8"))
    return str(entry["title"]).lower(), " ".join(map(str, said)).lower()


def _best(applies: Sequence[Mapping[str, Any]], facts: Facts) -> Match | None:
    matches = [triggers.match(Trigger.from_json(record), facts) for record in applies]
    return max((m for m in matches if m), key=lambda m: (len(m.held), -len(m.open)), default=None)


# ---------------------------------------------------------------- facts
def facts_of_words(bound: str | None, words: Iterable[str]) -> Facts:
    """Facts of NAME=VALUE words; a name that two groups have is written GROUP.NAME. Raises `UserError`."""
    known = triggers.vocabulary()
    groups: dict[str, dict[str, float]] = {}
    for word in words:
        name, equals, text = word.partition("=")
        group, _, short = name.partition(".")
        if group in known:
            name = short
        else:
            holders = [g for g, names in known.items() if name in names]
            group = holders[0] if holders else ("resources" if name.isupper() else "")
        if not equals or not group:
            every = [n for names in known.values() for n in names]
            raise UserError(f"{word!r} is no fact NAME=VALUE: {nearest(name, every)}.")
        try:
            number = float({"true": "1", "false": "0"}.get(text.lower(), text))
        except ValueError:
            number = math.nan
        if not math.isfinite(number):
            raise UserError(f"{word!r}: {text!r} is not a number.")
        groups.setdefault(group, {})[name] = number
    return Facts(bound, groups)


def facts_of_record(record: Mapping[str, Any], state: str = "burst") -> Facts:
    """Facts of a measured or compiled record. Times in `state`, but for `burst` and `sustained` themselves."""
    from mla_var3.lab.devlog import values

    times: dict[str, float] = {}
    for name, expression, scale in (
        ("of_limit", f"{state}.of_limit", 100.0),
        ("of_matmul", f"{state}.of_matmul", 100.0),
        ("of_read", f"{state}.of_read", 100.0),
        ("limit", f"{state}.limit", 1.0),
        ("burst", "burst", 1.0),
        ("sustained", "sustained", 1.0),
        ("host", "host", 1.0),
    ):
        try:
            times[name] = values.evaluate(expression, record, None).number * scale
        except values.Unknown:
            continue
    groups = {"problem": _problem(record["problem"]), "resources": _resources(record.get("resources")), "times": times}
    return Facts((record.get("limits") or {}).get("bound"), groups)


def facts_of_profile(record: Mapping[str, Any], problem: Mapping[str, Any]) -> Facts:
    """Facts of what `mla-var3 profile` kept of one kernel (`profiling.facts.Facts.to_record`)."""
    counters: dict[str, float] = {}
    launches = record.get("launches") or []
    if launches:
        main = max(launches, key=lambda one: one["figures"].get("duration_us", 0.0))
        counters = {**main["figures"], **{f"stall.{name}": share for name, share in main["stalls"].items()}}
    times = {"of_limit": record["percent_of_limit"]} if record.get("percent_of_limit") is not None else {}
    groups = {
        "problem": _problem(problem),
        "resources": _resources(record.get("resources")),
        "counters": counters,
        "times": times,
    }
    return Facts(record["roofline"]["bound"], groups)


def _problem(problem: Mapping[str, Any]) -> dict[str, float]:
    known = {k: float(v) for k, v in problem.items() if isinstance(v, (int, float)) and not isinstance(v, bool)}
    known["rows"] = known.get("s", 1) * known.get("h", 1) / max(known.get("h_kv", 1), 1)
    known["causal"] = float(bool(problem.get("causal")))
    known["ragged"] = float(problem.get("lengths", "uniform") != "uniform")
    return known


def _resources(resources: Mapping[str, Any] | None) -> dict[str, float]:
    if not resources:
        return {}
    plain = {k: float(v) for k, v in resources.items() if isinstance(v, (int, float))}
    if plain.get("spill_bytes") == 0:  # older records do not say of what spills where it does
        plain["spill_loop_bytes"] = 0.0
    return plain | {k: float(v) for k, v in (resources.get("instructions") or {}).items()}
