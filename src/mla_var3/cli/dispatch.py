"""`mla-var3 dispatch`: which version is picked for a problem, by which rule, and what the records say of the rules."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import TYPE_CHECKING

from mla_var3.catalogue import ledger
from mla_var3.cli.arguments import Parser, add_problem, doing, problem_of, says_problem
from mla_var3.device import Device
from mla_var3.dispatch import rules, selection
from mla_var3.errors import UserError, nearest

if TYPE_CHECKING:
    from mla_var3.dispatch.evidence import Claim, Timed
    from mla_var3.dispatch.selection import Judged
    from mla_var3.workload import Problem

HELP = "which version is picked for a problem, by which rule, and why"

ACTIONS = {"show": "which version and knobs for a problem, what it takes, and what the rules rest on"}

EPILOG = """\
examples:
  mla-var3 dispatch show --b 96 --h 16 --t 6000 --device h200
  mla-var3 dispatch show --workload norm --rows 4096
  mla-var3 sweep experiment=dispatch_boundaries               what the rules lack, and nothing else
  mla-var3 sweep experiment=decode 'kernels=dispatch,cute'    what is picked, as a contender"""


def main(words: Sequence[str]) -> int:
    """Runs `mla-var3 dispatch WORDS`."""
    if not words or words[0] in ("-h", "--help"):
        print("usage: mla-var3 dispatch ACTION ...\n\nactions:")
        print("\n".join(f"  {name:7}{text}" for name, text in ACTIONS.items()) + f"\n\n{EPILOG}")
        return 0
    action, rest = words[0], words[1:]
    if action not in ACTIONS:
        raise UserError(f"dispatch has no action {action!r}: {nearest(action, ACTIONS)}.")
    return _show(
        Parser(prog="mla-var3 dispatch show", description=f"{ACTIONS['show'].capitalize()}.", allow_abbrev=False), rest
    )


def _show(parser: argparse.ArgumentParser, words: Sequence[str]) -> int:
    from mla_var3.workload import DEFAULT, get

    add_problem(parser)
    parser.add_argument(
        "--workload",
        default=DEFAULT,
        metavar="NAME",
        help="what is computed: decode (default), prefill, norm, rope, gemm, ...",
    )
    parser.add_argument(
        "--device",
        default="auto",
        metavar="KEY",
        help="a key of `mla-var3 list devices` (default: the GPU here, else h200)",
    )
    args = parser.parse_args(list(words))
    if args.workload not in rules.served():
        raise UserError(f"--workload {args.workload!r} has no rules: {nearest(args.workload, rules.served())}.")
    device = (Device.detect() or Device.get("h200")) if args.device == "auto" else Device.get(args.device)
    workload = get(args.workload)
    problem = problem_of(args, workload)
    if not says_problem(args) and not any(one.verdict for one in selection.survey(problem, device)):
        problem = problem_of(args, workload, **workload.sample(False, {}))  # of two designs at once, say
    print(f"{problem.label} on {device.name}")
    with doing("reading records, and judging every rule"):
        judged = selection.survey(problem, device)
        lines = _explained(problem, device, judged)
    print("\n".join(lines))
    return 0 if any(one.verdict for one in judged) else 1


def _explained(problem: Problem, device: Device, judged: Sequence[Judged]) -> list[str]:
    from mla_var3.dispatch import evidence, expected

    whose, found = expected.timed_near(problem.workload, device)
    claims = evidence.claims(problem.workload, device) if evidence.complete() else []
    picked = next((one for one in judged if one.verdict), None)
    lines = []
    if picked is not None:
        mark = f"; {device.mark} on {device.arch}" if device.mark else ""
        lines.append(f"picked: {picked.choice.label}, by rule {picked.number}{mark}")
    else:
        lines.append("no version takes this problem here")
        if problem.workload == "prefill":
            from mla_var3.ops.prefill import ANYWHERE

            lines[-1] += f": mla_prefill computes it by {ANYWHERE}, which waits for the device"
    for one in judged:
        word = "picked" if one is picked else "then" if one.verdict else "not"
        lines.append(f"  {one.number}  {word:7}{one.choice.label}, for {one.rule.condition}: {one.rule.reason}")
        if not one.verdict:
            lines.append(f"            {one.verdict.reason}")
        else:
            lines += [f"            {text}" for text in _times(one, problem, device, whose, found)]
        for claim in (c for c in claims if c.number == one.number):
            lines += [f"            {text}" for text in _claimed(claim, device)]
        if one is picked and one.rule.records:
            told = {timed.record.id: timed for timed in found}
            known = [told[record] for record in one.rule.records if record in told]
            lines += [f"            made from record {_standing(timed)}" for timed in known]
    lines += [f"  -  not    {kernel.label}: no rule names it" for kernel in selection.unnamed(problem.workload)]
    return lines if evidence.complete() else [*lines, evidence.INCOMPLETE]


def _times(one: Judged, problem: Problem, device: Device, whose: Device, found: Sequence[Timed]) -> list[str]:
    """What a version takes: measured on this very problem, or expected."""
    from mla_var3.dispatch import expected

    label = one.choice.label
    here = expected.measured(label, problem, found) if whose == device else None
    if here is not None:
        times = ", ".join(f"{us:.1f} us {state}" for state, us in here.us.items())
        return [f"measured {times}: record {_standing(here)} of {here.record.at[:10]}"]
    guess = expected.Expectations(label, device, whose, found).of(problem)
    if guess is None:
        return ["no record here times it"]
    where = "" if whose == device else f", from records of {whose.key}"
    return [f"expected {guess.us:.1f} us, {guess.distance:.1f} octaves from the nearest record{where}"]


def _standing(timed: Timed) -> str:
    """A record's id, and how the code that it timed stands to the code here."""
    standing = ledger.standing(timed.record.kernel.label, timed.problem, timed.code)
    return f"{timed.record.id} ({timed.label}, {standing})"


def _claimed(claim: Claim, device: Device) -> list[str]:
    """What the records say of a claim."""
    word = "proved" if claim.proved else "records speak against it" if claim.slower else "unproved"
    what = f"{word} on {device.key}: faster than {claim.other.label}"
    if claim.bound is None:
        return [f"{what}, {'; '.join(map(str, claim.sides))}"]
    return [f"{what} up to the boundary of {claim.bound.quantity.name}", *(f"  {side}" for side in claim.sides)]
