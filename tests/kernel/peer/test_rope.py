"""torch.compile's rotation and append, uncompiled on the CPU: what it computes is judged."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from mla_var3.check.judge import check
from mla_var3.kernel import registry
from mla_var3.kernel.peer.prims import find
from mla_var3.workload.rope import RopeProblem

PEER = "torch_compile_rope_append"


@pytest.mark.parametrize("interleaved", [True, False])
def test_what_is_compiled_is_right(interleaved: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    library = find.Library(PEER, "torch", Path(), "1", "an imitation")
    monkeypatch.setitem(find._LOOK, PEER, lambda: library)
    plan_type = registry.get_plan(registry.KernelId("peer", "rope", PEER))
    monkeypatch.setattr(sys.modules[plan_type.__module__], "compiled", lambda fn: fn)
    problem = RopeProblem(tokens=5, h=3, positions=512, interleaved=interleaved)
    report = check(plan_type, problem, device="cpu", seeds=[3])
    assert report.ok, report.reason
    assert {"own", "one_token", "in_place"} <= {c.name for c in report.cases}
