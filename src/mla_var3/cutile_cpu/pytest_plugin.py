"""Runs a test suite that wants a GPU on the CPU: `python -m pytest -p mla_var3.cutile_cpu.pytest_plugin …`.

The whole session is inside `pretend_gpu`, from before the suite's own `conftest.py` is loaded. A test that ends in an
operation the interpreter does not run is `refused`, one that pytest-timeout ends is `too slow`; both are counted beside
passed and failed, and fail the session.
"""

from __future__ import annotations

import os
from collections import Counter
from contextlib import ExitStack
from typing import Any

import pytest

from mla_var3.cutile_cpu.errors import KernelFault, Misuse

_PRETENDING = pytest.StashKey[ExitStack]()

#: Outcomes that are counted in the summary, in its order.
OUTCOMES = ("passed", "failed", "refused", "too slow", "skipped")


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("cutile", "cuTile kernels on a CPU")
    group.addoption("--cutile-arch", default="sm_90", help="architecture of the pretended GPU (sm_90)")
    group.addoption("--cutile-sms", type=int, default=132, help="its number of multiprocessors (132)")
    group.addoption("--cutile-no-poison", action="store_true", help="padding that is not determined is zero, not NaN")
    group.addoption("--cutile-no-strict", action="store_true", help="a tile wholly outside its array is padding")
    group.addoption(
        "--cutile-every", type=int, default=1, metavar="N", help="run every Nth test only, for a first look"
    )


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests(early_config: pytest.Config) -> None:
    from mla_var3.cutile_cpu.pretend import pretend_gpu

    asked = early_config.known_args_namespace
    back = ExitStack()
    back.enter_context(
        pretend_gpu(
            arch=asked.cutile_arch,
            sms=asked.cutile_sms,
            poison=not asked.cutile_no_poison,
            strict=not asked.cutile_no_strict,
        )
    )
    early_config.stash[_PRETENDING] = back
    # Workers of pytest-xdist load `-p` plugins after their conftest files, and those of the environment before.
    others = [name for name in os.environ.get("PYTEST_PLUGINS", "").split(",") if name]
    if __name__ not in others:
        os.environ["PYTEST_PLUGINS"] = ",".join([*others, __name__])


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    kept = items[:: config.getoption("cutile_every")]
    if len(kept) < len(items):
        config.hook.pytest_deselected(items=[item for item in items if item not in kept])
        items[:] = kept


def pytest_unconfigure(config: pytest.Config) -> None:
    back = config.stash.get(_PRETENDING, None)
    if back is not None:
        back.close()
        del config.stash[_PRETENDING]


# ---------------------------------------------------------------- outcomes
def _chain(error: BaseException | None) -> list[BaseException]:
    found: list[BaseException] = []
    while error is not None and error not in found:
        found.append(error)
        error = error.__cause__ or error.__context__
    return found


def _reason(error: BaseException) -> tuple[str, str]:
    """(outcome, why in a few words) of a test that did not pass."""
    for link in _chain(error):
        if isinstance(link, KernelFault):
            return "failed", f"KernelFault: {link.message}"
        if isinstance(link, Misuse):
            wrong_call = isinstance(link, (TypeError, ValueError, OverflowError))
            return "failed" if wrong_call else "refused", f"{type(link).__name__}: {link}"
    text = str(error).strip().splitlines()
    slow = isinstance(error, pytest.fail.Exception) and "from pytest-timeout" in str(error)
    return "too slow" if slow else "failed", f"{type(error).__name__}: {text[0] if text else ''}"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Any:
    report = yield
    if report.outcome == "failed" and call.excinfo is not None:
        # Plain attributes: they travel from pytest-xdist's workers.
        report.cutile_outcome, report.cutile_reason = _reason(call.excinfo.value)
    return report


def pytest_report_teststatus(report: pytest.TestReport) -> tuple[str, str, str] | None:
    outcome = getattr(report, "cutile_outcome", "failed")
    return None if outcome == "failed" else (outcome, outcome[0].upper(), outcome.upper())


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """A row for each test file, and how often each reason made tests fail."""
    files: dict[str, Counter[str]] = {}
    reasons: Counter[str] = Counter()
    for outcome in (*OUTCOMES, "error"):
        for report in terminalreporter.stats.get(outcome, []):
            kind = "failed" if outcome == "error" else outcome
            files.setdefault(report.nodeid.split("::")[0], Counter())[kind] += 1
            if kind not in ("passed", "skipped"):
                reasons[f"{kind}: {getattr(report, 'cutile_reason', '?')[:160]}"] += 1
    write = terminalreporter.write_line
    terminalreporter.section("cuTile on a CPU")
    write("".join(f"{word:>9}" for word in OUTCOMES))
    total: Counter[str] = Counter()
    for file, counts in sorted(files.items()):
        write("".join(f"{counts[word]:9}" for word in OUTCOMES) + f"  {file}")
        total += counts
    write("".join(f"{total[word]:9}" for word in OUTCOMES) + "  in all")
    for reason, count in reasons.most_common(20):
        write(f"{count:6} x {reason}")
