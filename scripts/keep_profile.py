"""Keeps what a profile says, without what only its machine needs: for results/<device>/profiles/.

    python scripts/keep_profile.py out/profiles/ncu/cute-dsl-flash_mla_v1/b128_s1_h128_t4096/20261121T134147Z \
        --to results/h200/profiles

Of each folder report.md, params.json and facts.json are copied to <to>/<mode>/<kernel>/<problem>/, and of a trace its
picture. The raw report, the Chrome trace and the binaries stay behind (tens of MB). facts.json keeps the named figures,
the stall reasons and the hottest lines of every launch, not its thousands of raw metrics. Paths of the machine are cut
to their last part.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from pathlib import Path
from typing import Any

KEPT = ("report.md", "params.json", "facts.json")
PICTURE = "trace.svg"
_PATH = re.compile(r"(?<![\w.:/-])/(?:[\w.+-]+/)+([\w.+-]+)")


def without_folders(text: str) -> str:
    """Absolute paths cut to their last part."""
    return _PATH.sub(r"\1", text)


def without_metrics(facts: dict[str, Any]) -> dict[str, Any]:
    """Facts without the raw metrics of the launches."""
    kernels = [
        {**kernel, "launches": [{k: v for k, v in one.items() if k != "metrics"} for one in kernel["launches"]]}
        for kernel in facts["kernels"]
    ]
    return {**facts, "kernels": kernels}


def keep(folder: Path, to: Path) -> Path:
    """Copies one profile; returns where it went. Raises SystemExit where `folder` is no finished profile."""
    missing = [name for name in KEPT if not (folder / name).is_file()]
    if missing:
        raise SystemExit(f"keep_profile: {folder} has no {missing[0]}: give the folder of a finished profile.")
    mode, kernel, problem = folder.resolve().parts[-4:-1]
    target = to / mode / kernel / problem
    target.mkdir(parents=True, exist_ok=True)
    facts = without_metrics(json.loads((folder / "facts.json").read_text()))
    (target / "facts.json").write_text(without_folders(json.dumps(facts, indent=1)) + "\n")
    params = json.loads((folder / "params.json").read_text())
    (target / "params.json").write_text(without_folders(json.dumps(params, indent=1)) + "\n")
    (target / "report.md").write_text(without_folders((folder / "report.md").read_text()))
    if (folder / PICTURE).is_file():
        (target / PICTURE).write_bytes((folder / PICTURE).read_bytes())
    return target


def main(words: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="keep_profile", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("folders", nargs="+", type=Path, metavar="PROFILE", help="folder of a finished profile")
    parser.add_argument("--to", type=Path, required=True, help="results/<device>/profiles")
    args = parser.parse_args(words)
    for folder in args.folders:
        print(keep(folder, args.to))
    return 0


if __name__ == "__main__":
    sys.exit(main())
