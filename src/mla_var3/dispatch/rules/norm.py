"""RMSNorm, alone or of two parts of a row."""

from __future__ import annotations

from mla_var3.dispatch.rule import HOPPER, Bound, Quantity, Rule
from mla_var3.workload.norm import NormProblem


def _near(problem: NormProblem, value: float) -> list[NormProblem]:
    return [problem.replace(rows=max(1, round(value / problem.columns)))]


ELEMENTS = Quantity("elements", lambda pd: pd.rows * pd.columns, _near)

RULES = (
    Rule(
        "triton/rmsnorm",
        "of half a gigabyte and more only the rate of memory counts, and a program a row comes nearer to it",
        where=(Bound(ELEMENTS, 1 << 28, above=True),),
        archs=HOPPER,
        records=(
            "90f6d016abc6",
            "971013b0d370",
            "bea6330c35c8",
            "e2b9dc005548",
            "094e840bcb94",
            "e89bcbd8e94c",
            "159f6800276f",
            "597ee7693133",
        ),
    ),
    Rule(
        "cute-dsl/rmsnorm",
        "a short call gains by starting before the one in front of it has ended, and by reading both norms in one pass",
        archs=HOPPER,
        records=(
            "0ecbafc11eff",
            "6720631c8297",
            "2f2447a06723",
            "ac000864074e",
            "dc9493cf5138",
            "ed9ad9a0570f",
            "2d5c80f6bc86",
            "e4feab8a285b",
        ),
    ),
    Rule("triton/rmsnorm", "it takes GPUs that no version in CuTe DSL is written for"),
    Rule("cutile-dsl/rmsnorm", "the last resort"),
)
