"""The interpreter refuses what cuTile's compiler refuses: the table, its programs, and a sample compiled anew."""

# ruff: noqa: E402 - the imports below need what importorskip found
from __future__ import annotations

import random
from dataclasses import replace

import pytest

pytest.importorskip("torch")
ct = pytest.importorskip("cuda.tile", reason="cuda-tile is not installed")

import refusals
from refusals import Probe, Verdict, blame, front_end, probes, table

from mla_var3 import cutile_cpu
from mla_var3.cutile_cpu.refused import REFUSED
from mla_var3.cutile_cpu.unsupported import UNSUPPORTED, Use

PROBES: dict[str, Probe] = {p.name: p for p in probes()}
REFUSED_PROGRAMS = refusals.PROGRAMS.read_text().split()


def _refusal(probe: Probe) -> str | None:
    """What the interpreter says when it refuses a program; None where it runs it, or the front end refuses it."""
    try:
        cutile_cpu.launch((1,), probe.kernel, probe.inputs(), arch=probe.arch, poison=False)
    except cutile_cpu.UnsupportedOperation as refused:
        return str(refused)
    except ct.TileError:
        pass
    return None


def _said(use: Use) -> str:
    operation, detail, dtype = use
    return f"does not run `{operation}`{f' ({detail})' if detail else ''} of {dtype}, which cuTile's compiler refuses"


ROWS = {(*row, dtype) for row, dtypes in REFUSED.items() for dtype in dtypes}


def test_every_program_that_the_compiler_refuses_is_refused_and_every_row_is_one() -> None:
    assert len(REFUSED_PROGRAMS) > 300
    reached = set()
    for name in REFUSED_PROGRAMS:
        said = _refusal(PROBES[name])
        assert said is not None, f"{name} runs here"
        (row,) = (use for use in ROWS if _said(use) in said)
        reached.add(row)
        assert "refusals.py:" in said and "; " in said.rsplit("`", 1)[1], said
        assert "\n" not in said
    assert reached == ROWS, sorted(ROWS - reached)


def test_programs_that_the_compiler_accepts_run() -> None:
    accepted = sorted(set(PROBES) - set(REFUSED_PROGRAMS))
    for name in random.Random(0).sample(accepted, 250):
        said = _refusal(PROBES[name])
        assert said is None, f"{name}: {said}"


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("load-nan-whole-int32", r"`load` \(padding_mode NAN\) of int32.*PaddingMode.ZERO and choose.*ct.where"),
        ("load-pos_inf-overhanging-float8_e4m3fn", r"`load` \(padding_mode POS_INF\) of float8_e4m3fn.*ct.where"),
        ("load-neg_zero-whole-float8_e8m0fnu", r"`load` \(padding_mode NEG_ZERO\) of float8_e8m0fnu.*ct.where"),
        ("load_rows-zero-whole-float8_e8m0fnu", r"`load_advanced_indexing` .*as uint8.*ct.bitcast"),
        ("exp-float8_e5m2", r"`exp` of float8_e5m2.*convert to float32 first"),
        ("less-float8_e4m3fn", r"`<` of float8_e4m3fn.*convert to float32 first"),
        ("permute_1-float32", r"`permute` \(rank 1\) of any data type.*leave it out"),
        ("cdiv-float16", r"`cdiv` of float16.*write ct.ceil\(x / y\)"),
        ("atan2-int32", r"`atan2` of int32.*convert to float32 first"),
        ("floordiv-uint16", r"`//` of uint16.*signed type first, or shift"),
    ],
)
def test_the_message_names_operation_and_data_type_and_what_to_do(name: str, said: str) -> None:
    with pytest.raises(cutile_cpu.UnsupportedOperation, match=said):
        cutile_cpu.launch((1,), PROBES[name].kernel, PROBES[name].inputs())


def _needs_the_compiler() -> None:
    from cuda.tile._compile import _find_compiler_bin

    try:
        _find_compiler_bin()
    except FileNotFoundError:
        pytest.skip("tileiras is not installed")


@pytest.mark.parametrize("gpu", ["the oldest", "sm_100", "sm_120"])
def test_a_sample_compiled_anew_is_as_the_table_says(gpu: str) -> None:
    _needs_the_compiler()
    # A refused program of every kernel, and some that the compiler accepts.
    refused: dict[str, str] = {}
    for name in REFUSED_PROGRAMS:
        refused.setdefault(name.rpartition("-")[0], name)
    accepted = [n for n in sorted(set(PROBES) - set(REFUSED_PROGRAMS)) if not n.startswith(("gather", "cast"))]
    chosen = [*refused.values(), *random.Random(1).sample(accepted, 30)]
    programs = [PROBES[name] for name in chosen]
    verdicts = refusals.ask([p if gpu == "the oldest" else replace(p, arch=gpu) for p in programs])
    for name, verdict in verdicts.items():
        late = not verdict.accepted and verdict.uses is not None
        assert late == (name in REFUSED_PROGRAMS), f"{name}: {verdict.said or 'accepted'}"
        assert late == bool(verdict.uses and verdict.uses & ROWS), name


def test_blame_takes_only_what_no_accepted_program_has() -> None:
    a, b, c = ("exp", "", "float8_e5m2"), ("where", "", "float8_e5m2"), ("log", "", "float8_e5m2")
    accepted = Verdict(True, frozenset({b}))
    refused, lost = blame({"x": accepted, "y": Verdict(False, frozenset({a, b}), "no"), "z": Verdict(False, None)})
    assert refused == {a} and not lost
    _, lost = blame({"y": Verdict(False, frozenset({a, c}), "no")})
    assert lost and "no" in lost[0]
    _, lost = blame({"x": accepted, "y": Verdict(False, frozenset({b}), "no")})
    assert lost
    assert '    ("exp", ""): ("float8_e5m2",),\n}' in table(frozenset({a}))


def test_operations_are_judged_by_names_that_the_package_has() -> None:
    from mla_var3.cutile_cpu.ops import FACTORIES, load_all
    from mla_var3.cutile_cpu.unsupported import _JUDGED, _VIEWS

    load_all()
    assert set(_JUDGED) | set(_VIEWS) <= set(FACTORIES)
    assert not (set(_JUDGED) | set(_VIEWS)) & set(UNSUPPORTED)


def test_the_front_ends_refusals_are_no_rows() -> None:
    uses, bytecode, said = front_end(PROBES["add-float8_e4m3fn"])
    assert uses is None and not bytecode and "float8_e4m3fn" in said
    assert _refusal(PROBES["add-float8_e4m3fn"]) is None
