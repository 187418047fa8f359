"""What ranks pass to one another: the store to peers in Triton's interpreter, what is refused, and the script that
times it, over gloo with a clock that is not a GPU's."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from mla_var3.errors import UserError  # noqa: E402
from mla_var3.lab.devlog.tables import over_gpus  # noqa: E402
from mla_var3.ops.exchange import Collective, exchange_of  # noqa: E402
from mla_var3.record import load  # noqa: E402

#: Three ranks in one process: their buffers lie in one memory, and a barrier is nothing to wait for.
STORE = """
import torch
from types import SimpleNamespace
from mla_var3.lab.devlog.tables import over_gpus  # noqa: E402
from mla_var3.ops.exchange import Symmetric, _Buffer

RANKS, H, K, P = 3, 5, 48, 16
for b, s in ((2, 1), (1, 3)):
    memory = [torch.full((1 << 16,), 0x7F, dtype=torch.uint8) for _ in range(RANKS)]
    peers = torch.tensor([m.data_ptr() for m in memory])
    ways = [Symmetric(None, RANKS, r, "cpu") for r in range(RANKS)]
    for way, own in zip(ways, memory):
        way.held.append(_Buffer(own, SimpleNamespace(barrier=lambda channel: None), peers))
    q = torch.randn(RANKS, b, s, H, K + P).bfloat16()
    for way, mine in zip(ways, q):
        every = way.queries(mine, K)
    whole = q.permute(1, 2, 0, 3, 4).reshape(b, s, RANKS * H, K + P)
    assert torch.equal(every, whole)
    out, lse = torch.randn(RANKS, b, s, RANKS * H, K).bfloat16(), torch.randn(RANKS, b, RANKS * H, s)
    for way, o, e in zip(ways, out, lse):
        way.partials(o, e)
    for rank, way in enumerate(ways):
        heads = slice(rank * H, (rank + 1) * H)
        found = way._view(way._layout[0], (RANKS, b, s, H, K), torch.bfloat16)
        assert torch.equal(found, out[:, :, :, heads])
        found = way._view(way._layout[1], (RANKS, b, s, H), torch.float32)
        assert torch.equal(found, lse[:, :, heads].transpose(2, 3))
        assert torch.equal(way._view(0, whole.shape, torch.bfloat16), whole)
print("stored")
"""

#: A backend whose replays run when they are asked for: every step of a measurement, in wall-clock time.
CLOCK = """
import sys, time
from pathlib import Path
from types import SimpleNamespace
sys.path.insert(0, "scripts")
import context_parallel
from mla_var3.measure.cuda_backend import CpuBackend

class Clock(CpuBackend):
    times = True
    def capture(self, calls, rotations, **_):
        return lambda: [call() for _ in range(rotations) for call in calls]
    def start(self, replay, count):
        taken = []
        for _ in range(count):
            start = time.perf_counter()
            replay()
            taken.append(1e6 * (time.perf_counter() - start))
        return SimpleNamespace(wait=lambda: taken)
    def idle(self, seconds): ...
    def limit_calls(self):
        return {"matmul": (lambda: time.sleep(1e-4), 1e9), "read": (lambda: time.sleep(1e-4), 1e6)}

context_parallel.COLD_BYTES = 1.0
context_parallel.code_of = lambda *_: None
changes = {"burst_rounds": 2, "graph_ms": 0.1}
sys.exit(context_parallel.measure(Path(sys.argv[1]), small=True, seconds=600, backend=Clock(), **changes))
"""


#: What the script says of cells that the command line chose, and of two halves: an exchange that hides, one that lasts.
MODEL = """
import sys
from types import SimpleNamespace
sys.path.insert(0, "scripts")
import context_parallel as cp
from mla_var3.dispatch import choose

(cell,) = cp.cells(False, 2, ["experiment.grid=[{h: [128], b: [16], t: [32768]}, {h: [2], b: [1], t: [32768]}]"])
assert (cell.b, cell.h, cell.t) == (16, 128, 32768)
ranks = SimpleNamespace(count=2, hardware=cp.Device.get("h100"))
decode = choose(cell.replace(h=64, t=16384), ranks.hardware).us
over = cp.Over("symmetric", None, overlap=True)
for latency, hidden in ((10.0, 2 * decode), (1e4, 1e4)):
    run = SimpleNamespace(ranks=ranks, links={"symmetric": cp.Link(latency, 0.0)})
    assert cp.Run.model_us(run, cell, over) == latency + hidden
print("predicted")
"""


def run(words: list[str], root: Path, **env: str) -> str:
    done = subprocess.run(
        [sys.executable, *words], capture_output=True, text=True, timeout=300, check=False, cwd=root,
        env={**os.environ, "PYTHONPATH": str(root / "src"), "OMP_NUM_THREADS": "1", **env},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_every_row_gets_to_its_peer(repo_root: Path) -> None:
    pytest.importorskip("triton")
    assert "stored" in run(["-c", STORE], repo_root, TRITON_INTERPRET="1")


def test_two_halves_are_predicted(repo_root: Path) -> None:
    assert "predicted" in run(["-c", MODEL], repo_root)


def test_what_cannot_be_is_said() -> None:
    q = torch.zeros(1)
    way = Collective(None, 1, 0)
    assert exchange_of(way, None, q) is way
    with pytest.raises(UserError, match="exchange 'nvshmem' is unknown"):
        exchange_of("nvshmem", None, q)


def test_ranks_are_checked_and_timed(repo_root: Path, tmp_path: Path) -> None:
    """Two ranks over gloo: records that hold what was predicted and what was measured."""
    script = tmp_path / "clock.py"
    script.write_text(CLOCK)
    words = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script), str(tmp_path)]
    text = run(words, repo_root)
    assert text.count("passed {") == 6 and 'take "collective"' in text
    loaded = load(tmp_path / "context_parallel.jsonl")
    assert not loaded.problems
    tilings = [r.tiling or {} for r in loaded.records if r.kernel.label == "ops/mla_decode_cp"]
    found = {(tiling["exchange"], tiling.get("overlap", False)) for tiling in tilings}
    assert found == {("all_gather", False), ("collective", False), ("collective", True)}
    assert len(loaded.records) == 2 + len(tilings) and len(tilings) == 2 * len(found)
    rows = over_gpus([{**record.model_dump(), "device": "h100"} for record in loaded.records]).splitlines()
    assert len(rows) == 2 + 6 and all("burst model_us -->" in row and "vs" in row for row in rows[2:])
    assert sum("| collective, overlapped |" in row for row in rows) == 2
    for record in loaded.records:
        assert record.status == "passed" and record.median("burst") and record.scheduled("burst")
        assert record.error and record.error.out < 0.02 and record.limit("burst")
        assert record.model_dump()["model_us"] > 0
