"""What compute-sanitizer says of the smallest kernels with the reports that `diagnosis.reports` knows.

When one of these fails with a newer tool, the tool has learned: take the report out of `reports.KNOWN` and the pages.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from mla_var3.lab.diagnosis import reports
from mla_var3.lab.profiling.modes import tools

pytestmark = pytest.mark.gpu
KERNEL = Path(__file__).with_name("barrier_places.py")


@pytest.mark.parametrize(
    ("tool", "variant", "reported", "right"),
    [
        ("synccheck", "two", True, True),  # right, and reported: two places wait at one barrier
        ("synccheck", "one", False, True),
        ("synccheck", "two sync=barrier.sync", False, True),  # the same machine instruction
        ("synccheck", "give rounds=6", False, True),
        ("racecheck", "give rounds=6", True, True),  # right, and reported: one arrives, the other waits
        ("racecheck", "one rounds=6", False, True),
        ("racecheck", "pass", False, True),
        ("racecheck", "pass own=1", True, True),  # right, and reported: the writer has passed a barrier of its own
        ("racecheck", "pass own=2", False, True),  # another one between its write and its arrival
        ("racecheck", "stored own=1", False, True),  # at an mbarrier it is followed,
        ("racecheck", "copied own=1", False, True),  # where copies arrive by themselves too
        ("racecheck", "ring rounds=6", False, True),
        ("racecheck", "ring rounds=6 by=synced", True, True),  # right, and reported: a lane arrives for its warp
        ("racecheck", "none", True, False),  # a real race
    ],
)
def test_what_the_tool_says(tool: str, variant: str, reported: bool, right: bool) -> None:
    exe = tools.find("compute-sanitizer")
    if exe is None:
        pytest.skip("compute-sanitizer is not here")
    words = [str(exe), "--tool", tool, sys.executable, str(KERNEL), *variant.split()]
    said = subprocess.run(words, capture_output=True, text=True, timeout=120, check=False).stdout
    count = reports.total(said)
    assert count is not None, said
    assert (count > 0) == reported, said
    if tool == "racecheck":  # synccheck ends the process at its first report
        assert ("right" in said.splitlines()) == right, said


def test_the_kernels_are_right_without_a_tool() -> None:
    variants = ("one rounds=9", "two rounds=9", "two rounds=9 again=same late=1", "give rounds=9 peel=1")
    for variant in (*variants, "stored", "waited", "copied", "ring rounds=9", "ring rounds=9 by=warp"):
        done = subprocess.run(
            [sys.executable, str(KERNEL), *variant.split()], capture_output=True, text=True, timeout=60
        )
        assert (done.returncode, done.stdout) == (0, "right\n"), variant
