#!/usr/bin/env python3
"""Writes docs/results/ from record files: a page an experiment, every figure with its record in an HTML comment.

scripts/results_pages.py            # after a sweep: name its file in `FILES`
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from mla_var3.device import Device
from mla_var3.kernel import registry
from mla_var3.lab.devlog.tables import against_libraries, comparison, label, summary
from mla_var3.record import load

ROOT = Path(__file__).resolve().parents[1]

#: Page -> what it shows.
WHAT = {
    "decode": "Requests of equal length, heads and context as DeepSeek V3 has them (`experiment=decode`).",
    "tensor_parallel": "Heads as tensor parallelism leaves them on one GPU (`experiment=tensor_parallel`).",
    "query_rows": "4 to 512 query rows a request (`experiment=query_rows`).",
    "ragged": (
        "Requests of unequal length, as a server has them (`experiment=ragged`). Kernels read the lengths on the "
        "device and have no hint. FlashMLA makes its schedule with a kernel that the 61 layers of a step share: a 61st "
        "of its time is in the ratio, all of it in the ratio that is scheduled in every call."
    ),
    "unseen": (
        "Problems drawn at random from a seed that was new in that run, so that no kernel was made for them "
        "(`experiment=unseen`)."
    ),
}
FILES = {name: f"h200/2026-11-25-{name}-v23.jsonl" for name in WHAT}

HEAD = "<!-- Written by scripts/results_pages.py: change that, not this. -->\n"
METHOD = (
    f"{Device.get('h200').name}, bf16, latent 512 + rope 64, 64-token pages, cold L2. Burst is a cool chip, "
    "sustained the chip at its power limit; the limit is max(FLOPs / cuBLAS rate, bytes / read rate) of the same "
    "run. All contenders of a cell took turns in one process. The library is FlashMLA, built from source; a "
    "speedup above 1 means that the kernel here is faster."
)


def page(name: str) -> str:
    """The text of one page."""
    records = [record.model_dump() for record in load([ROOT / "results" / FILES[name]]).records]
    here = {kernel.label for kernel in registry.all_kernels()}
    live = [r for r in records if label(r) in here]
    return (
        f"{HEAD}\n# {name}\n\n{METHOD}\n\n{WHAT[name]} Records: `results/{FILES[name]}`.\n\n{summary(live)}\n\n"
        f"## The fastest kernel here against the library\n\n{against_libraries(live)}\n\n"
        f"## All contenders\n\n{comparison(records)}\n"
    )


def index() -> str:
    """The text of docs/results/README.md."""
    rows = "".join(f"- [{name}]({name}.md): {what}\n" for name, what in WHAT.items())
    return f"{HEAD}\n# Results\n\n{METHOD}\n\n{rows}"


def pages() -> dict[str, str]:
    """File name -> text of every page."""
    return {"README.md": index(), **{f"{name}.md": page(name) for name in WHAT}}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("out", nargs="?", type=Path, default=ROOT / "docs" / "results", help="default: docs/results")
    out = parser.parse_args().out
    out.mkdir(parents=True, exist_ok=True)
    for name, text in pages().items():
        (out / name).write_text(text, encoding="utf-8")
        print(out / name)
    return 0


if __name__ == "__main__":
    sys.exit(main())
