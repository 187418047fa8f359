"""Every exchange on two GPUs, plain and overlapped: right on requests that break one, by the script that times them;
and the same bits from replays of a graph in which several calls follow one another."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.gpu

#: Calls of one exchange, overlapped and not, behind one another in a graph, as layers of a step. Queries are new in
#: every replay, and nothing that an earlier one left may pass for what this one is to write.
REPLAYS = """
import sys
sys.path.insert(0, "scripts")
import context_parallel as cp
from mla_var3.measure.settings import BenchSettings
from mla_var3.ops import DecodeSchedule
from mla_var3.workload import decode

ranks = cp.Ranks(BenchSettings())
torch, found = ranks.torch, cp.contenders(ranks)
for number, given in enumerate(cp.HOSTILE):
    problem = decode.MlaProblem(b=5, t=1000, h=128, **given)
    share = cp.share_of(ranks, problem, number, alone=True)
    whole = decode.make_inputs(problem, ranks.device, seed=number, dist="normal")[1]
    for exchange in ("collective", "symmetric"):
        plain, overlapped = found[exchange], found[f"{exchange}_overlap"]
        layers = (overlapped, overlapped, plain, overlapped, plain)

        def step():
            schedules = {over.name: DecodeSchedule() for over in layers}
            return [cp.call(ranks, problem, share, over, schedules[over.name]) for over in layers]

        step()
        ranks.together()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            made = step()
        for replay in range(20):
            generator = torch.Generator(ranks.device).manual_seed(replay)
            share.q.copy_(torch.randn(share.q.shape, device=ranks.device, generator=generator))
            share.own.copy_(share.q[:, :, share.heads])
            cp.poison(ranks, overlapped)
            for out, lse in made:
                out.fill_(float("nan")), lse.fill_(float("nan"))
            graph.replay()
            eager = {over.name: cp.call(ranks, problem, share, over) for over in (plain, overlapped)}
            for over, (out, lse) in zip(layers, made, strict=True):
                want_out, want_lse = eager[over.name]
                assert torch.equal(out, want_out) and torch.equal(lse, want_lse), (over.name, replay)
            wanted = cp.reference(problem, share, whole)
            for name, answers in eager.items():
                report = cp.judged(answers, wanted)
                assert report.ok, (name, replay, report.reason)
        ranks.say(f"{problem.label} {exchange}: replays are right")
        del graph, made
ranks.together()
ranks.dist.destroy_process_group()
"""


def on_two_gpus(words: list[str], root: Path) -> str:
    import torch

    if torch.cuda.device_count() < 2:
        pytest.skip("there are not two GPUs here")
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", *words],
        capture_output=True, text=True, timeout=300, check=False, cwd=root,
        env={**os.environ, "PYTHONPATH": os.pathsep.join((str(root / "src"), os.environ.get("PYTHONPATH", "")))},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_two_gpus_give_what_one_would(repo_root: Path, tmp_path: Path) -> None:
    text = on_two_gpus(["scripts/context_parallel.py", "--out", str(tmp_path), "--seconds", "0"], repo_root)
    for name in ("all_gather", "collective", "collective_overlap", "symmetric", "symmetric_overlap"):
        assert text.count(f" {name}: passed") == 2


def test_replays_of_a_graph_give_what_calls_do(repo_root: Path, tmp_path: Path) -> None:
    script = tmp_path / "replays.py"
    script.write_text(REPLAYS)
    assert on_two_gpus([str(script)], repo_root).count("replays are right") == 4
