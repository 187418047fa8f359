"""Reading an experiment's records: a line for each cell and kernel.

    python read_records.py [FOLDER]          # out/results, where compiled and CPU records go; results on a GPU machine

A record has all that is needed to measure its point again: kernel, problem, tiling, device, times, the limits of the
same run, resources, environment and source. `mla_var3.record.Record` has the fields. Needs the extra lab.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from mla_var3.record import load


def lines(folder: Path) -> list[str]:
    """What the records below a folder say, the newest of each kernel and cell last."""
    found = []
    for path in sorted(folder.rglob("*.jsonl")):
        for record in load(path).records:
            said, time, share = record.reason or record.status, record.median("burst"), record.of_limit("burst")
            if time is not None:
                said = f"{time:.1f} us" + ("" if share is None else f", {100 * share:.0f} % of the limit")
            elif record.resources is not None:
                said += f", {record.resources['registers']} registers"
            found.append(f"{record.device:6}{record.problem_label:24}{record.kernel.label:26}{said}")
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    words = list(sys.argv[1:] if arguments is None else arguments)
    folder = Path(words[0]) if words else Path("out/results")
    if not folder.is_dir():
        print(f"there is no folder {folder}: run the sweep first", file=sys.stderr)
        return 2
    print("\n".join(lines(folder)) or f"no records below {folder}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
