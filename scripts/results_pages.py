#!/usr/bin/env python3
"""Writes docs/results/ from record files: a page an experiment, every figure with its record in an HTML comment.

scripts/results_pages.py            # after a sweep: name its file in `PAGES`
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from mla_var3.kernel import registry
from mla_var3.lab.devlog.tables import against_libraries, comparison, label
from mla_var3.record import load

ROOT = Path(__file__).resolve().parents[1]

#: Page -> (record file, what it shows).
PAGES = {
    "decode": (
        "h200/2026-11-24-decode-v21.jsonl",
        "Requests of equal length: heads, query tokens and context as DeepSeek V3 has them (`experiment=decode`).",
    ),
    "tensor_parallel": (
        "h200/2026-11-24-tensor_parallel-v21.jsonl",
        "Heads as tensor parallelism leaves them on one GPU (`experiment=tensor_parallel`).",
    ),
    "ragged": (
        "h200/2026-11-24-ragged-v21.jsonl",
        (
            "Requests of unequal length: uniform in 0..t, or normal around t (`experiment=ragged`). Versions 21 and 22 "
            "and FlashMLA deal the work out from the lengths on the device; the retired versions cut it on the host, "
            "and were told the mean length."
        ),
    ),
}

HEAD = "<!-- Written by scripts/results_pages.py: change that, not this. -->\n"
METHOD = (
    "NVIDIA H200, bf16, latent 512 + rope 64, 64-token pages, cold L2. Burst is a cool chip, sustained the chip at its "
    "power limit; the limit is max(FLOPs / cuBLAS rate, bytes / read rate) of the same run. All contenders of a cell "
    "took turns in one process. The library is FlashMLA, built from source; a speedup above 1 means that the kernel "
    "here is faster."
)


def page(name: str) -> str:
    """The text of one page."""
    file, what = PAGES[name]
    records = [record.model_dump() for record in load([ROOT / "results" / file]).records]
    here = {kernel.label for kernel in registry.all_kernels()}
    live = [r for r in records if label(r) in here]
    return (
        f"{HEAD}\n# {name}\n\n{what} {METHOD} Records: `results/{file}`.\n\n"
        f"## The fastest kernel here against the library\n\n{against_libraries(live)}\n\n"
        f"## All contenders\n\nVersions that are retired stand beside those that replaced them.\n\n"
        f"{comparison(records)}\n"
    )


def index() -> str:
    """The text of docs/results/README.md."""
    rows = "".join(f"- [{name}]({name}.md): {what}\n" for name, (_, what) in PAGES.items())
    return f"{HEAD}\n# Results\n\n{METHOD}\n\n{rows}"


def pages() -> dict[str, str]:
    """File name -> text of every page."""
    return {"README.md": index(), **{f"{name}.md": page(name) for name in PAGES}}


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
