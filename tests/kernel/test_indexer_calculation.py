"""What a call of the indexer's two kernels takes, calculated from rates and times that the bench measured, and what one
form that fuses them could save.

The logits of few requests are read at the rate of the run's read limit, behind a start that does not depend on their
number. The top-k behind them adds what it takes alone. A form that fuses them cannot save more than the top-k adds, and
has to choose somewhere: among candidates that the CTAs of the logits send, it takes what the top-k of a short row
takes, and the CTAs' own choice before it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mla_var3.workload.indexer_logits import IndexerLogitsProblem

#: Microseconds of a call whose bytes are none: launch, the search for a CTA's piece, the first and the last tile.
START = 3.1
#: Microseconds of the choice inside the CTAs of the logits: nine barriers and three passes, counted beforehand.
OWN_CHOICE = 0.7
FEW = 8  # requests


def records(root: Path, names: str, design: str, version: int | None = None) -> Iterator[dict[str, Any]]:
    for path in sorted((root / "results" / "h200").glob(names)):
        for line in path.read_text(encoding="utf-8").splitlines():
            record = json.loads(line)
            kernel = record["kernel"]
            of_it = kernel["language"] == "cute-dsl" and kernel["design"] == design
            if of_it and record["status"] == "passed" and version in (None, kernel["version"]):
                yield record


def burst(record: dict[str, Any]) -> float:
    return float(record["time_us"]["burst"]["median"])


def logits_us(record: dict[str, Any]) -> float:
    """Calculated: of the logits of a record's problem, at the read rate that the same run measured."""
    p = record["problem"]
    problem = IndexerLogitsProblem(b=p["b"], s=p["s"], t=p["t"], heads=p["heads"])
    return START + problem.cost().bytes / float(record["limits"]["burst"]["read_gbps"]) / 1e3


@pytest.fixture(scope="module")
def chosen(repo_root: Path) -> dict[tuple[int, int], float]:
    """The least time of the top-k alone, by rows and logits."""
    found: dict[tuple[int, int], float] = {}
    for record in records(repo_root, "*topk*.jsonl", "topk"):
        p = record["problem"]
        if p["topk"] == 2048 and p["dtype"] == "fp32" and record["kernel"]["version"] >= 5:
            key = p["b"] * p["s"], p["t"]
            found[key] = min(found.get(key, burst(record)), burst(record))
    return found


def decode(root: Path) -> dict[tuple[int, int], dict[str, Any]]:
    """Records of the two kernels, of few requests of one query token with 64 heads, by requests and tokens."""
    found = {}
    for record in records(root, "2026-11-29-indexer_topk.jsonl", "indexer_topk", 0):
        p = record["problem"]
        if p["table"] and p["s"] == 1 and p["heads"] == 64 and p["b"] <= FEW:
            found[p["b"], p["t"]] = record
    return found


def test_logits_of_few_requests_take_a_start_and_their_bytes(repo_root: Path) -> None:
    seen = 0
    for record in records(repo_root, "*-indexer_paged*.jsonl", "mqa_logits", 4):
        p = record["problem"]
        if p["s"] == 1 and p["b"] <= 32:
            assert abs(logits_us(record) / burst(record) - 1) < 0.04, p
            seen += 1
    assert seen >= 4


def test_both_kernels_take_the_logits_and_the_top_k_behind_them(
    repo_root: Path, chosen: dict[tuple[int, int], float]
) -> None:
    seen = 0
    for key, record in decode(repo_root).items():
        if key in chosen:
            assert abs((logits_us(record) + chosen[key]) / burst(record) - 1) < 0.06, key
            seen += 1
    assert seen >= 5


def test_what_candidates_could_save(repo_root: Path, chosen: dict[tuple[int, int], float]) -> None:
    """1.2 times the speed of both kernels for one request of 32k to 128k tokens and for two of 32k, less where more
    tokens are read, and nothing for requests of 8k."""
    gains = {}
    for key, record in decode(repo_root).items():
        fused = logits_us(record) + OWN_CHOICE + chosen[1, 8192]
        gains[key] = burst(record) / fused
    assert {key for key, gain in gains.items() if gain >= 1.2} == {(1, 32768), (1, 65536), (1, 131072), (2, 32768)}
    assert all((gain < 1.0) == (t == 8192) for (_, t), gain in gains.items())
