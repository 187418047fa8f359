"""The dispatcher: which rule decides, what the records say of the rules, and what a call should take."""

from __future__ import annotations

import dataclasses
import math
import warnings
from pathlib import Path
from typing import Any

import pytest

import made_up
from mla_var3 import cli
from mla_var3.catalogue import registry
from mla_var3.catalogue.registry import KernelId
from mla_var3.cli.arguments import experiment_cells
from mla_var3.device import Device, Requirement
from mla_var3.dispatch import choose, evidence, expected, rules, selection, survey
from mla_var3.dispatch.rule import Bound, Quantity, Rule
from mla_var3.dispatch.rules.decode import PAGE, ROWS
from mla_var3.errors import Unsupported, UserError, Verdict
from mla_var3.record import Record
from mla_var3.runtime.plan import KernelPlan
from mla_var3.runtime.types import Tiling
from mla_var3.workload import decode, get, names
from mla_var3.workload.decode import MlaProblem
from mla_var3.workload.prefill import PrefillProblem
from mla_var3.workload.sparse_decode import SparseProblem

H200, H100, A100 = (Device.get(key) for key in ("h200", "h100", "a100"))


# ---------------------------------------------------------------- a laboratory of its own
@dataclasses.dataclass(frozen=True)
class ToyTiling(Tiling):
    tile: int = 1
    num_splits: int = 0

    def validate(self, pd: MlaProblem, device: Device | None = None) -> Verdict:
        return Verdict.yes() if self.tile < 9 else Verdict.no("tile is over 8")


class ToyPlan(KernelPlan):
    workload = decode.WORKLOAD
    tiling_type = ToyTiling
    requires = Requirement(archs=("sm_90a",))

    def default_tiling(self) -> ToyTiling:
        return ToyTiling()

    def autotune_configs(self) -> list[Tiling]:
        return [ToyTiling()]

    def plan(self, *inputs: Any) -> Any:
        raise NotImplementedError

    def plan_empty(self) -> Any:
        raise NotImplementedError


class FewRowsPlan(ToyPlan):
    requires = Requirement(archs=("sm_90a",), problem=lambda pd: Verdict(pd.dtype == "bf16", "no fp16"))


class AnywherePlan(ToyPlan):
    requires = Requirement(archs=("sm_80+",))


class WaitingPlan(ToyPlan):
    graph_capturable = False


MANY, FEW, ODD = (KernelId("cute-dsl", "mla", "toy", n) for n in range(1, 4))
LAST = KernelId("triton", "mla", "toy")
PLANS: dict[KernelId, Any] = {MANY: ToyPlan, FEW: FewRowsPlan, ODD: WaitingPlan, LAST: AnywherePlan}

T = Quantity("tokens", lambda pd: pd.t, lambda pd, value: [pd.replace(t=round(value))])
HOPPER = ("sm_90a",)
RULES = (
    Rule(ODD.label, "it is odd", where=(Bound(T, 1 << 21),), archs=HOPPER),
    Rule(FEW.label, "rows are few", where=(Bound(ROWS, 32), Bound(T, 8192)), archs=HOPPER, records=("x",)),
    Rule(MANY.label, "rows are many", archs=HOPPER, tiling=(("num_splits", 4),)),
    Rule(LAST.label, "the last resort"),
)


@pytest.fixture
def toys(monkeypatch: pytest.MonkeyPatch) -> None:
    own = {kernel.label: kernel for kernel in PLANS}
    monkeypatch.setattr(registry, "all_kernels", lambda: tuple(PLANS))
    monkeypatch.setattr(registry, "get_plan", lambda kernel: PLANS[kernel])
    monkeypatch.setattr(registry, "missing", lambda what: None)
    monkeypatch.setattr(Rule, "kernel", property(lambda rule: own[rule.version]))
    monkeypatch.setattr(rules, "of", lambda workload: RULES)


def record(kernel: KernelId, us: float, *, run: float = 1.0, at: str = "2026-01-01T00:00:00Z", **fields: Any) -> Record:
    """A passed record. run: records of one number took turns. fields: of the problem, or of the record where their name
    is one of its."""
    own = {name: fields.pop(name) for name in list(fields) if name in Record.model_fields}
    problem = MlaProblem(**fields)
    limits = {
        state: {
            "matmul_tflops": 800.0 + run,
            "read_gbps": 4600.0,
            "limit_us": expected.limit_us(problem, H200, (state,)),
        }
        for state in evidence.STATES
    }
    made = {
        "id": f"{kernel.module_name}-{problem.label}-{us:g}", "at": at, "limits": limits,
        "tiling": {"tile": 1, "num_splits": 0},
    }  # fmt: skip
    return made_up.record(kernel, us, problem, **{**made, **own})


def timed(*records: Record) -> tuple[evidence.Timed, ...]:
    return evidence.of_records(records, "decode")


# ---------------------------------------------------------------- picking
@pytest.mark.parametrize(
    ("problem", "kernel"),
    [
        ({"h": 128}, MANY),
        ({"h": 16}, FEW),
        ({"h": 16, "t": 8192}, FEW),
        ({"h": 16, "t": 8193}, MANY),
        ({"h": 4, "s": 8}, FEW),
        ({"h": 4, "s": 9}, MANY),
    ],
)
def test_the_first_rule_that_holds_decides(toys: None, problem: dict[str, Any], kernel: KernelId) -> None:
    choice = choose(MlaProblem(**problem), H200)
    assert choice.kernel == kernel
    assert choice.knobs == ({"num_splits": 4} if kernel == MANY else {})
    assert choice.records == (("x",) if kernel == FEW else ())
    plan = choice.plan(MlaProblem(**problem), H200)
    assert plan.tiling == ToyTiling(num_splits=4 if kernel == MANY else 0)


def test_a_rule_whose_version_refuses_falls_through(toys: None, monkeypatch: pytest.MonkeyPatch) -> None:
    judged = survey(MlaProblem(h=16, dtype="fp16"), H200)
    assert [bool(one.verdict) for one in judged] == [False, False, True, True]
    assert "waits for the device" in judged[0].verdict.reason and "no fp16" in judged[1].verdict.reason
    assert choose(MlaProblem(h=16, dtype="fp16"), H200).kernel == MANY
    assert [one.number for one in judged] == [1, 2, 3, 4]

    def broken(kernel: KernelId) -> Any:
        if kernel == FEW:
            raise SyntaxError("half a kernel")
        return PLANS[kernel]

    monkeypatch.setattr(registry, "get_plan", broken)
    assert choose(MlaProblem(h=16), H200).kernel == MANY
    assert "SyntaxError: half a kernel" in survey(MlaProblem(h=16), H200)[1].verdict.reason


def test_a_rule_is_for_its_architectures(toys: None, monkeypatch: pytest.MonkeyPatch) -> None:
    assert choose(MlaProblem(h=16), A100).kernel == LAST
    monkeypatch.setattr(rules, "of", lambda workload: RULES[:-1])
    with pytest.raises(Unsupported, match=r"no version takes .* on a100: .*the rule is for sm_90a, and this is sm_80"):
        choose(MlaProblem(h=16), A100)


def test_a_condition_narrows_the_choice(toys: None) -> None:
    def accepts(plan_type: Any, plan: Any) -> Verdict:
        return Verdict(plan_type is not FewRowsPlan, "not this one")

    assert choose(MlaProblem(h=16), H200, accepts=accepts).kernel == MANY


def test_a_workload_without_rules_is_not_served(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rules, "of", lambda workload: ())
    with pytest.raises(Unsupported, match="workload decode has no rules in mla_var3/dispatch/rules"):
        choose(MlaProblem(), H200)


def test_a_missing_package_that_makes_serving_slow_is_warned_of_once(
    toys: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def without(language: str) -> None:
        monkeypatch.setattr(
            registry, "missing", lambda what: "left out." if getattr(what, "language", what) == language else None
        )
        monkeypatch.setattr(selection, "_warned", set())

    without("cute-dsl")
    with pytest.warns(RuntimeWarning, match=r"triton/toy is picked; cute-dsl/toy_v3 comes first .* left out\.$"):
        assert choose(MlaProblem(), H200).kernel == LAST
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        choose(MlaProblem(h=16), H200)  # it was said
        monkeypatch.setattr(selection, "_warned", set())
        choose(MlaProblem(), A100)  # no rule with a version in CuTe DSL is for it
        without("triton")
        choose(MlaProblem(), H200)  # nobody who serves needs it


# ---------------------------------------------------------------- evidence
def cells(few: float, many: float, **fields: Any) -> list[Record]:
    """Both versions in turn."""
    return [record(FEW, few, **fields), many_of(many, **fields)]


def many_of(us: float, **fields: Any) -> Record:
    """With the knobs of its rule."""
    return record(MANY, us, **{"requested": {"num_splits": 4}, **fields})


def claim_of(found: tuple[evidence.Timed, ...], bound: Bound) -> evidence.Claim:
    return next(one for one in evidence.claims("decode", H200, found) if one.bound == bound)


@pytest.fixture
def claims(toys: None, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(rules, "of", lambda workload: RULES[1:])
    monkeypatch.setattr(FewRowsPlan, "requires", Requirement())  # it takes problems beyond its rule
    return RULES[1].where


def test_a_boundary_is_proved_by_cells_on_both_sides_of_it(claims: tuple[Bound, Bound]) -> None:
    by_rows, by_tokens = claims
    below, above = cells(10.0, 11.0, h=32, t=4096), cells(12.0, 11.5, h=64, t=4096, run=2.0)
    assert claim_of(timed(*below, *above), by_rows).proved
    short = claim_of(timed(*below), by_rows)
    assert not short.proved and not short.slower
    assert [bool(side.ratios) for side in short.sides] == [True, False]
    assert short.sides[1].probe is not None and 32 < ROWS.of(short.sides[1].probe) <= 64
    # Cells that lie over an octave away prove nothing, nor do times of two runs, or of one version.
    far = cells(10.0, 11.0, h=8, t=4096)
    apart = [record(FEW, 10.0, h=32), many_of(11.0, h=32, run=3.0)]
    for some in (far, apart, below[:1]):
        assert not claim_of(timed(*some, *above), by_rows).sides[0].ratios
    # Each boundary of a rule is one of its own: these are within an octave of the one in rows.
    assert not claim_of(timed(*below, *above), by_tokens).sides[1].ratios
    assert claim_of(timed(*below, *cells(12.0, 11.0, h=32, t=16384)), by_tokens).proved


def test_records_may_speak_against_a_rule(claims: tuple[Bound, Bound]) -> None:
    above = cells(12.0, 11.5, h=64, t=4096, run=2.0)
    wrong = claim_of(timed(*cells(11.0, 10.0, h=32, t=4096), *above), claims[0])
    assert wrong.slower and not wrong.proved and wrong.sides[0].mean == pytest.approx(1.1)
    wrong = claim_of(timed(*cells(10.0, 11.0, h=32, t=4096), *cells(11.0, 11.5, h=64, run=2.0)), claims[0])
    assert wrong.slower, "what is picked beyond the boundary is slower there"


def test_a_record_counts_until_other_code_of_its_version_was_timed(claims: tuple[Bound, Bound]) -> None:
    code = {"digest": "old", "kernels": []}
    old = [record(FEW, 10.0, h=32, code=code), many_of(11.0, h=32, code=code)]
    assert claim_of(timed(*old), claims[0]).sides[0].ratios
    newer = record(FEW, 9.0, h=32, at="2026-01-02T00:00:00Z", run=5.0, code={"digest": "new", "kernels": []})
    assert not claim_of(timed(*old, newer), claims[0]).sides[0].ratios


def test_every_rule_of_prompts_was_timed_or_names_a_cell_that_would_tell() -> None:
    claims = evidence.claims("prefill", H200)
    judged = {i for i, rule in enumerate(rules.of("prefill"), 1) if rule.where and rule.fits(H200)}
    judged.add(max(judged) + 1)  # the one that takes the rest of what the language has
    assert {claim.number for claim in claims if claim.sides[0].ratios or claim.sides[0].probe} == judged
    probes = [side.probe for claim in claims for side in claim.sides if side.probe]
    assert all(probe.s == probe.t for probe in probes), "prompts longer or shorter than their keys"


def test_where_only_one_takes_the_problems_there_is_nothing_to_compare(
    claims: tuple[Bound, Bound], monkeypatch: pytest.MonkeyPatch
) -> None:
    few = Requirement(problem=lambda pd: Verdict(not pd.packed and pd.rows <= 32, "too many rows"))
    monkeypatch.setattr(FewRowsPlan, "requires", few)
    claim = claim_of(timed(*cells(10.0, 11.0, h=32, t=4096)), claims[0])
    assert claim.proved and claim.sides[1].probe is None
    assert "only one of the two takes them" in str(claim.sides[1])


def test_what_is_missing_is_gone_once_it_is_measured(
    claims: tuple[Bound, Bound], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = [record(FEW, 10.0, b=64, h=16)]
    monkeypatch.setattr(evidence, "timed", lambda *_: timed(*found))
    lacking = evidence.missing("decode", H200)
    assert len(lacking) >= 3 and all({FEW.label, MANY.label} & set(pair) for pair in lacking.values())
    for i, (problem, pair) in enumerate(lacking.items()):
        fields = {name: getattr(problem, name) for name in problem.fields()}
        fields["queries"] = None if problem.queries is None else {"total": problem.query_tokens}
        picked = choose(problem, H200).kernel.label
        for label in pair:
            kernel = next(k for k in PLANS if k.label == label)
            fields["requested"] = {"num_splits": 4} if kernel == MANY else "default"
            found.append(record(kernel, 10.0 if label == picked else 11.0, run=float(i + 10), **fields))
    assert evidence.missing("decode", H200) == {}


# ---------------------------------------------------------------- the shipped rules
def test_every_rule_names_a_version_of_its_workload_and_records_of_it() -> None:
    assert {"decode", "sparse_decode", "norm", "rope", "packed_append", "gemm", "merge"} <= set(rules.served())
    assert set(rules.served()) <= set(names())
    for name in rules.served():
        found = rules.of(name)
        assert found and not found[-1].where, "the last one takes what the others leave"
        kept = {one.record.id: one for device in (H200, H100) for one in evidence.timed(name, device.key)}
        for rule in found:
            assert rule.kernel.workload == name and rule.kernel.language not in selection.NOT_SERVED
            for identity in rule.records:
                one = kept[identity]
                assert one.code and one.label in {other.label for other in found}, "of known code"
            runs = {kept[identity].record.run for identity in rule.records if kept[identity].label == rule.label}
            assert all(kept[identity].record.run in runs for identity in rule.records), "in turn with another one"
        assert not selection.unnamed(name), "a version that no rule names is never picked"


def test_a_kernel_knows_its_workload() -> None:
    own = [k for k in registry.all_kernels() if k.language != "peer" and not registry.missing(k.language)]
    assert own and {k.label: k.workload for k in own} == {k.label: registry.get_plan(k).workload.name for k in own}
    assert KernelId("triton", "norm", "nothing").workload == ""


#: Cells in which the pick takes 1.05 or more of the time of another version, by records of two runs, and what it takes
#: at most. In this one version 24 is picked, as it has 32 query rows. In four other cells of 32 query rows version 24
#: takes as long as version 23 or less, so that the rule stands.
SLOWER = {"b20_s2_h16_t8153_causal_one_long": 1.12}


@pytest.mark.parametrize("device", [H200, H100], ids=lambda device: device.key)
def test_picks_are_the_fastest_that_was_recorded(device: Device) -> None:
    """Over all cells of decode that were timed: the time of the pick over the best one of any version there, each
    brought to the limits of its own run. Cells of which the pick was never timed count as equal."""
    best: dict[MlaProblem, dict[str, float]] = {}
    for one in evidence.timed("decode", device.key):
        if len(one.us) == 2:
            shares = [us / (one.record.limit(state) or math.inf) for state, us in one.us.items()]
            best.setdefault(one.problem, {})[one.label] = math.sqrt(math.prod(shares))
    losses = {}
    for problem, times in best.items():
        label = choose(problem, device).label
        losses[problem] = math.log(times[label] / min(times.values())) if label in times else 0.0
    assert len(losses) > 250
    assert math.exp(math.fsum(losses.values()) / len(losses)) < 1.0005
    behind = {problem.label: math.exp(loss) for problem, loss in losses.items() if math.exp(loss) >= 1.05}
    assert behind.keys() == (SLOWER.keys() if device == H200 else set())
    assert all(behind[label] <= SLOWER[label] for label in behind)


@pytest.mark.parametrize("experiment", ["decode", "ragged", "query_rows", "tensor_parallel", "pages"])
@pytest.mark.parametrize("device", [H200, H100], ids=lambda device: device.key)
def test_measured_chips_are_served_by_cute(experiment: str, device: Device) -> None:
    found = experiment_cells(experiment)
    baselines = [cell for cell in found if choose(cell, device).kernel.language != "cute-dsl"]
    assert len(found) >= 12 and not baselines


@pytest.mark.parametrize(
    ("fields", "label"),
    [
        ({"h": 32}, "cute-dsl/flash_mla_v24"),
        ({"h": 33}, "cute-dsl/flash_mla_v23"),
        ({"h": 16, "page": 1}, "cute-dsl/flash_mla_v23"),
        ({"h": 16, "page": 8}, "cute-dsl/flash_mla_v23"),
        ({"h": 16, "page": 9}, "cute-dsl/flash_mla_v24"),
        ({"b": 64, "h": 16, "causal": True, "queries": {"chunks": 1, "tokens": 512}}, "cute-dsl/flash_mla_v23"),
        ({"h": 16, "k": 384}, "cute-dsl/flash_mla"),
        ({"h": 16, "k": 16, "p": 16}, "triton/flash_mla"),
        ({"h": 16, "k": 128, "p": 32}, "cute-dsl/flash_mla_mma_v1"),
    ],
    ids=str,
)
def test_what_decode_picks(fields: dict[str, Any], label: str) -> None:
    if reason := registry.missing("cute-dsl"):
        pytest.skip(reason)
    assert choose(MlaProblem(**{"b": 4, **fields}), H200).kernel.label == label


@pytest.mark.parametrize("device", ["a100", "rtx4090", "rtx5090", "b200"])
def test_other_gpus_take_flash_mla_mma_for_few_query_rows_and_for_what_triton_does_not_take(device: str) -> None:
    if reason := registry.missing("cute-dsl"):
        pytest.skip(reason)

    def picked(**fields: Any) -> str:
        return choose(MlaProblem(b=4, **fields), Device.get(device)).kernel.label

    for fields in ({"h": 16}, {"h": 16, "s": 2}, {"h": 16, "k": 256}, {"h": 16, "queries": [3, 0, 4, 1]}):
        assert picked(**fields) == "cute-dsl/flash_mla_mma_v1"
    many, blackwell = "cute-dsl/flash_mla_mma_v3", device in ("rtx5090", "b200")
    for fields in (
        {"h": 128, "queries": [3, 0, 70, 1], "causal": True},
        {"h": 128, "strided_pages": True},
        {"h": 64, "s": 4, "tree": True},
    ):
        assert picked(**fields) == ("cute-dsl/flash_mla_mma_v1" if blackwell else many)
    assert picked(h=33) == picked(h=128) == picked(h=16, s=4) == ("triton/flash_mla" if blackwell else many)
    assert picked(h=64, p=0) == ("cute-dsl/flash_mla_mma_v1" if blackwell else many)
    assert picked(h=64, dtype="fp16") == ("triton/flash_mla" if blackwell else many)
    assert picked(h=16, k=64) == picked(h=64, k=128) == "triton/flash_mla"


@pytest.mark.parametrize("device", ["a100", "a40", "rtx4090", "rtx5090", "b200"])
def test_other_gpus_take_sparse_mla_mma_for_one_cache_and_triton_for_two(device: str) -> None:
    if reason := registry.missing("cute-dsl"):
        pytest.skip(reason)
    of = Device.get(device)
    for fields in ({"h": 128}, {"h": 16, "layout": "flat"}, {"h": 16, "t": 4096, "paged": True}, {"layout": "bf16"}):
        assert choose(SparseProblem(b=4, **fields), of).kernel.label == "cute-dsl/sparse_mla_mma"
    if of.sm_version >= (8, 9):
        assert choose(SparseProblem(b=4, extra=64), of).kernel.label == "triton/sparse_mla"


@pytest.mark.parametrize("device", ["a100", "a40", "rtx4090", "rtx5090", "b200", "h200"])
def test_other_gpus_take_prompts_by_products_of_single_warps(device: str) -> None:
    """Where their tilings were checked: of no wider values."""
    if reason := registry.missing("cute-dsl"):
        pytest.skip(reason)
    of = Device.get(device)
    for fields in ({}, {"dtype": "fp16", "p": 0}, {"lengths": [9, 0, 300, 1]}, {"h_kv": 2}, {"d": 256, "p": 0}):
        problem = PrefillProblem(**{"b": 4, "s": 1024, "h": 16, "causal": True, "lengths": [9, 0, 3, 1], **fields})
        if of.arch == "sm_90a":
            assert choose(problem, of).kernel.design == "flash_attention"
        elif problem.d > 128:
            with pytest.raises(Unsupported):
                choose(problem, of)
        else:
            assert choose(problem, of).kernel.label == "cute-dsl/flash_attention_mma"


@pytest.mark.parametrize("quantity", [ROWS, PAGE], ids=lambda q: q.name)
def test_problems_near_a_value_have_it(quantity: Quantity) -> None:
    for value in (2.0, 32.0, 64.0):
        near = list(quantity.near(MlaProblem(b=8, h=2), value))
        assert near and all(quantity.of(problem) == pytest.approx(value, rel=0.1) for problem in near)


# ---------------------------------------------------------------- what a call should take
def test_expectations_lie_between_measured_points(toys: None) -> None:
    found = timed(
        *(record(MANY, 2 * (expected.limit_us(MlaProblem(b=b), H200) + 5), b=b) for b in (8, 16, 64, 128)),
        record(FEW, 1.0, b=32),
    )
    told = expected.Expectations(MANY.label, H200, H200, found)
    at = told.of(MlaProblem(b=32))
    assert at is not None and at.distance > 0.5 and len(at.records) == expected.NEIGHBOURS
    limit = expected.limit_us(MlaProblem(b=32), H200)
    assert at.us == pytest.approx(2 * (limit + 5), rel=0.1)
    here = told.of(MlaProblem(b=64))
    assert (
        here is not None
        and here.distance == 0
        and here.us == pytest.approx(2 * (expected.limit_us(MlaProblem(b=64), H200) + 5), rel=0.01)
    )
    assert max(told.errors()) < 0.3 and len(told.errors()) == 4
    assert expected.Expectations(ODD.label, H200, H200, found).of(MlaProblem()) is None
    assert expected.spread([0.1] * 9) is None and expected.spread([0.1] * 10) == (0.1, pytest.approx(0.1))


def test_a_card_is_no_faster_for_the_limits_of_its_day(toys: None) -> None:
    """Limits and times that are both a tenth longer change nothing of what is expected."""
    plain, slow = record(MANY, 300.0, b=128), record(MANY, 330.0, b=128)
    assert slow.limits is not None
    for state in evidence.STATES:
        getattr(slow.limits, state).limit_us *= 1.1
    us = [expected.Expectations(MANY.label, H200, H200, timed(one)).of(MlaProblem(b=64)) for one in (plain, slow)]
    assert us[0] and us[1] and us[0].us == pytest.approx(us[1].us, rel=0.02)


def test_a_measured_problem_is_shown_as_measured(toys: None) -> None:
    cell = {"b": 1, "t": 1048576}
    found = timed(record(MANY, 390.0, **cell, experiment="context_parallel"), record(MANY, 9.0, b=2))
    here = expected.measured(MANY.label, MlaProblem(**cell), found)
    assert here is not None and here.us == {"burst": 390.0, "sustained": 390.0}
    assert expected.measured(FEW.label, MlaProblem(**cell), found) is None


def test_what_times_something_else_than_speed_is_not_counted(toys: None) -> None:
    for fields in (
        {"experiment": "host_cost"}, {"experiment": "mla_var6_plus"},
        {"status": "incorrect", "reason": "x", "time_us": None, "error": None},
    ):  # fmt: skip
        assert timed(record(MANY, 9.0, **fields)) == ()
    assert timed(record(KernelId("torch", "mla", "flash_mla"), 9.0)) == ()
    (tiled,) = timed(record(MANY, 9.0, requested={"num_splits": 4}))
    assert tiled.label == f"{MANY.label} (num_splits=4)" == RULES[2].label, "knobs make it another contender"


def test_a_device_without_peaks_is_judged_by_those_of_the_measured_one(toys: None) -> None:
    bare = dataclasses.replace(H200, key="mig-3g", num_sms=60, hbm_gbps=None, tflops={}, measured=(), known=False)
    with pytest.raises(UserError, match="mig-3g has no peaks"):
        expected.limit_us(MlaProblem(), bare)
    guess = expected.Expectations(MANY.label, bare, H200, timed(record(MANY, 300.0, b=128))).of(MlaProblem(b=128))
    assert guess is not None and guess.us == pytest.approx(300.0, rel=0.01)


# ---------------------------------------------------------------- the verb
def test_show_says_what_is_picked_and_why(toys: None, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    found = timed(record(FEW, 10.0, b=128, h=16), record(MANY, 11.0, b=128, h=16))
    monkeypatch.setattr(evidence, "timed", lambda *_: found)
    monkeypatch.setattr(expected, "timed", lambda *_: found)
    words = ["dispatch", "show", "--b", "128", "--s", "1", "--h", "16", "--t", "4096"]
    assert cli.main([*words, "--device", "h200"]) == 0
    out = capsys.readouterr().out
    assert f"picked: {FEW.label}, by rule 2" in out and "rows are few" in out
    assert "measured 10.0 us burst, 10.0 us sustained: record" in out
    assert f"4  then   {LAST.label}" in out and "no record here times it" in out
    assert f"1  not    {ODD.label}" in out and "unproved on h200: faster than" in out
    assert cli.main([*words[:-1], "5000", "--device", "h200"]) == 0
    assert "expected " in capsys.readouterr().out
    assert cli.main([*words, "--device", "a100"]) == 0
    assert "; compiled, never run on sm_80\n" in capsys.readouterr().out
    monkeypatch.setattr(rules, "of", lambda workload: RULES[:-1])
    assert cli.main([*words, "--device", "a100"]) == 1
    assert "no version takes this problem here\n" in capsys.readouterr().out


def test_show_says_what_computes_a_prompt_that_no_version_takes(capsys: pytest.CaptureFixture[str]) -> None:
    from mla_var3.ops.prefill import ANYWHERE

    words = ["dispatch", "show", "--workload", "prefill", "--d", "256", "--p", "0", "--device", "a100"]
    assert cli.main(words) == 1
    assert f"no version takes this problem here: mla_prefill computes it by {ANYWHERE}" in capsys.readouterr().out


def test_of_some_records_alone_no_rule_is_called_proved(
    toys: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """An installed package has only some of the records."""
    found = timed(record(FEW, 10.0, b=128, h=16), record(MANY, 11.0, b=128, h=16))
    monkeypatch.setattr(evidence, "timed", lambda *_: found)
    monkeypatch.setattr(expected, "timed", lambda *_: found)
    words = ["dispatch", "show", "--b", "128", "--s", "1", "--h", "16", "--t", "4096", "--device", "h200"]
    assert cli.main(words) == 0
    out = capsys.readouterr().out
    assert "proved on h200" in out and evidence.INCOMPLETE not in out
    with monkeypatch.context() as installed:
        installed.setattr(evidence.paths, "repo_root", lambda: None)
        assert not evidence.complete()
    assert evidence.complete()
    monkeypatch.setattr(evidence, "complete", lambda: False)
    assert cli.main(words) == 0
    out = capsys.readouterr().out
    assert out.count(evidence.INCOMPLETE) == 1 and "proved on" not in out and "records speak against" not in out
    assert f"picked: {FEW.label}, by rule 2" in out and "measured 10.0 us burst" in out
    with pytest.raises(UserError, match="only in a checkout"):
        evidence.missing("decode", H200)


@pytest.mark.parametrize(
    "workload", sorted({"decode", "sparse_decode", "norm", "rope", "packed_append", "gemm", "merge"})
)
def test_show_takes_every_workload(workload: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["dispatch", "show", "--workload", workload, "--device", "h200"]) == 0
    out = capsys.readouterr().out
    assert f"picked: {choose(get(workload).problem(), H200).label}, by rule" in out
    assert out.count(" us") >= 1, "measured or expected"


@pytest.mark.parametrize("workload", rules.served())
def test_what_show_takes_where_nothing_is_asked_for_has_a_pick(
    workload: str, capsys: pytest.CaptureFixture[str]
) -> None:
    if registry.missing("cutile-dsl"):
        pytest.skip("the only version of two designs at once is in cuTile")
    assert cli.main(["dispatch", "show", "--workload", workload, "--device", "h200"]) == 0
    assert "\npicked: " in capsys.readouterr().out


def test_a_shape_that_one_gpu_was_timed_on_beside_several_is_measured(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["dispatch", "show", "--b", "1", "--h", "128", "--t", "1048576", "--device", "h200"]) == 0
    picked = capsys.readouterr().out.split("picked cute-dsl/flash_mla_v23")[1].splitlines()[1]
    assert "measured 398.1 us burst: record cee20277d0d3" in picked


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["shw"], "dispatch has no action 'shw': did you mean 'show'?"),
        (["show", "--device", "h2000"], "no device 'h2000'"),
        (["show", "--workload", "nrm"], "--workload 'nrm' has no rules: did you mean 'norm'?"),
    ],
)
def test_mistakes_are_named(words: list[str], sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["dispatch", *words]) == 2
    assert sentence in capsys.readouterr().err


def test_the_verb_explains_itself(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["dispatch"]) == 0
    out = capsys.readouterr().out
    assert "show" in out and "dispatch_boundaries" in out


# ---------------------------------------------------------------- the experiment
def test_the_experiment_has_what_the_rules_lack(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from mla_var3.lab.sweep import config, plan

    told = {
        MlaProblem(b=2, h=16): ("cute-dsl/flash_mla_v23", "cute-dsl/flash_mla_v24"),
        MlaProblem(b=3): ("triton/flash_mla",),
    }
    monkeypatch.setattr(evidence, "missing", lambda name, device: told if name == "decode" else {})
    plan._lacking_on.cache_clear()
    asked = config.compose(["experiment=dispatch_boundaries", "device=h200"])
    assert plan.expand_cells(asked) == list(told)
    kernels = plan.chosen_kernels(asked)
    assert [[k.label for k in plan.kernels_of(asked, kernels, cell)] for cell in told] == [
        list(x) for x in told.values()
    ]
    monkeypatch.setattr(evidence, "missing", lambda *_: {})
    plan._lacking_on.cache_clear()
    with pytest.raises(UserError, match="rules lack nothing on h200"):
        plan.expand_cells(asked)
    plan._lacking_on.cache_clear()
