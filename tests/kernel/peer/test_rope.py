"""torch.compile's rotation and append, uncompiled on the CPU, and FlashInfer's, over an imitation that computes with
torch there: what they compute is judged."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mla_var3.catalogue import libraries, registry
from mla_var3.check.judge import check
from mla_var3.workload.rope import RopeProblem, rotated

PEER = "torch_compile_rope_append"


@pytest.mark.parametrize("interleaved", [True, False])
def test_what_is_compiled_is_right(interleaved: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    library = libraries.Library(PEER, "torch", Path(), "1", "an imitation")
    monkeypatch.setitem(libraries._LOOK, PEER, lambda: library)
    plan_type = registry.get_plan(registry.KernelId("peer", "rope", PEER))
    monkeypatch.setattr(sys.modules[plan_type.__module__], "compiled", lambda fn: fn)
    problem = RopeProblem(tokens=5, h=3, positions=512, interleaved=interleaved)
    report = check(plan_type, problem, device="cpu", seeds=[3])
    assert report.ok, report.reason
    assert {"own", "one_token", "in_place"} <= {c.name for c in report.cases}


def rotate(q: Any, k: Any, q_out: Any, k_out: Any, table: Any, positions: Any, interleaved: bool) -> None:
    """FlashInfer's, of queries and keys (n, heads, p): float32, rounded once."""
    turns = table[positions][:, None]
    cosines, sines = turns.chunk(2, dim=-1)
    for x, out in ((q, q_out), (k, k_out)):
        assert x.stride(-1) == out.stride(-1) == 1
        out.copy_(rotated(x.float(), cosines, sines, interleaved=interleaved))


def append(
    latent: Any, key: Any, request: Any, position: Any, latents: Any, keys: Any, pages: Any, first: Any, last: Any
) -> None:
    """FlashInfer's: a token's page is that of its request's position; latents, keys (pages, tokens, columns)."""
    for i in range(len(latent)):
        page = pages[first[request[i]] + position[i] // latents.shape[1]]
        latents[page, position[i] % latents.shape[1]] = latent[i]
        keys[page, position[i] % latents.shape[1]] = key[i]


@pytest.mark.parametrize("interleaved", [True, False])
def test_the_calls_of_flashinfer_are_right(interleaved: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    name = "flashinfer_rope_append"
    library = libraries.Library(name, "package", Path(), "1", "an imitation")
    monkeypatch.setitem(libraries._LOOK, name, lambda: library)
    monkeypatch.setitem(sys.modules, "flashinfer.rope", SimpleNamespace(_apply_rope_pos_ids_cos_sin_cache=rotate))
    monkeypatch.setitem(sys.modules, "flashinfer.page", SimpleNamespace(append_paged_mla_kv_cache=append))
    plan_type = registry.get_plan(registry.KernelId("peer", "rope", name))
    problem = RopeProblem(tokens=5, h=3, positions=512, interleaved=interleaved)
    report = check(plan_type, problem, device="cpu", seeds=[3])
    assert report.ok, report.reason
    assert {"own", "one_token", "apart", "other", "heads"} <= {c.name for c in report.cases}
    assert "256 + 64" in plan_type.requires.accepts(problem.replace(k=256)).reason
