"""What a sweep says at its end: times of one run beside each other."""

from __future__ import annotations

from mla_var3 import paths
from mla_var3.kernel import registry
from mla_var3.lab.sweep import telling
from mla_var3.record import load
from mla_var3.workload.decode import MlaProblem

CELL = MlaProblem(b=128, s=1, h=16, t=4096)


def test_contenders_of_an_answer_took_turns_in_the_last_run_that_had_a_library() -> None:
    found = [r for r in load([paths.shipped_results_dir() / "h200"]).records if r.problem == CELL.to_record()]
    timed = sorted((r for r in found if r.median("burst") is not None), key=lambda r: r.at)
    here = {kernel.label for kernel in registry.all_kernels()}
    run = telling.last_run(timed, here)
    assert run and len({r.run for r in run}) == 1 < len({r.run for r in timed})
    own, libraries = (
        [r for r in run if (r.kernel.language == "peer") is peer and r.kernel.label in here] for peer in (False, True)
    )
    assert own and libraries
    # A version that was timed alone later is not put beside its library. Where no run has one, it counts.
    alone = own[0].model_copy(update={"at": "2999-01-01T00:00:00Z", "limits": None})
    assert telling.last_run([*timed, alone], here) == run
    assert telling.last_run([own[0], alone], here) == [alone]
    assert telling.last_run([], here) == []
