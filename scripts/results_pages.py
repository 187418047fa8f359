#!/usr/bin/env python3
"""Writes docs/results/ from record files: a page an experiment, and one for each further device, every figure with its
record in an HTML comment.

scripts/results_pages.py            # after a sweep: name its file in `FILES`
"""

from __future__ import annotations

import argparse
import functools
import sys
from pathlib import Path
from typing import Any

from mla_var3.device import Device
from mla_var3.kernel import registry
from mla_var3.lab.devlog.tables import against_libraries, comparison, label, over_gpus, problem_label, summary
from mla_var3.record import load

ROOT = Path(__file__).resolve().parents[1]

#: Page -> what it shows.
WHAT = {
    "decode": "Requests of equal length, heads and context as DeepSeek V3 has them (`experiment=decode`).",
    "tensor_parallel": "Heads as tensor parallelism leaves them on one GPU (`experiment=tensor_parallel`).",
    "query_rows": "4 to 512 query rows a request (`experiment=query_rows`).",
    "ragged": (
        "Requests of unequal length, as a server has them (`experiment=ragged`). Kernels read the lengths on the "
        "device and have no hint. What the 61 layers of a step share, a schedule made by a small kernel, has a 61st of "
        "its time in the ratio, and all of it in the ratio that is scheduled in every call."
    ),
    "unseen": (
        "Problems drawn at random from a seed that was new in that run, so that no kernel was made for them "
        "(`experiment=unseen`)."
    ),
    "sparse_decode": (
        "The tokens that indices name, over packed FP8 caches of DeepSeek V3.2's layout and V4's, with attention sinks "
        "where a cell's name has them (`experiment=sparse_decode`). FlashMLA takes 64 and 128 heads: fewer are padded "
        "to 64 for it. FlashAttention-3 reads the same tokens in bf16, by a page table of single tokens, and takes no "
        "sinks."
    ),
    "absorb_gemm": (
        "The two products per head around absorbed attention in DeepSeek V3's widths, queries to latent and latent to "
        "output, against `torch.bmm` (`experiment=absorb_gemm`)."
    ),
    "mla_layer": (
        "A decode step of a whole layer of DeepSeek V3, projections and all, against the same layer with FlashMLA for "
        "attention, whose schedule 61 layers share (`experiment=mla_layer`)."
    ),
}
#: Of pages whose dtypes, widths or caches are others than `DENSE`.
CACHES = {
    "sparse_decode": "bf16 queries, packed FP8 caches",
    "absorb_gemm": "bf16, heads of 128 columns, latent 512",
    "mla_layer": "bf16, hidden size 7168, latent 512 + rope 64, 64-token pages",
}
DENSE = "bf16, latent 512 + rope 64, 64-token pages"
#: Device -> experiment -> its record file in results/. The first device has a page an experiment, the others one each.
FILES = {
    "h200": {
        **{name: f"h200/2026-11-26-{name}.jsonl" for name in WHAT},
        **{
            name: f"h200/2026-11-27-{name}.jsonl"
            for name in ("decode", "query_rows", "ragged", "tensor_parallel", "unseen", "mla_layer")
        },
    },
    "h100": {
        **{name: f"h100/2026-11-26-{name}.jsonl" for name in WHAT},
        **{name: f"h100/2026-11-27-{name}.jsonl" for name in ("decode", "ragged", "unseen")},
    },
}
MAIN, *OTHERS = FILES
#: Device -> the record files of scripts/context_parallel.py, one a number of GPUs.
OVER_GPUS = {
    "h200": ("h200/2026-11-26-context_parallel-four.jsonl", "h200/2026-11-26-context_parallel.jsonl"),
    "h100": ("h100/2026-11-25-context_parallel.jsonl",),
}

HEAD = "<!-- Written by scripts/results_pages.py: change that, not this. -->\n"
METHOD = (
    "cold L2. Burst is a cool chip, sustained the chip at its power limit; "
    "the limit is max(FLOPs / cuBLAS rate, bytes / read rate) of the same run. Where nothing else is said, all "
    "contenders of a cell took turns in one process. The libraries are FlashMLA, built from source, and others where "
    "they are named; a speedup above 1 means that the kernel here is faster."
)

SEVERAL = (
    "Long requests over the GPUs of a host, pages in turn, beside one GPU in the same run: `collective` is NCCL's "
    "all-to-all of partials, `all_gather` its plain all-gather of them, `symmetric` stores into other GPUs' memory. "
    "Burst, cold L2, the slowest rank's time; what the 61 layers of a step share, the schedule and counts of lengths, "
    "has a 61st of its time in the ratio. The model is a line through two measured exchanges and the dispatcher's "
    "prediction of what a rank decodes; it was written down before."
)


@functools.cache
def records_in(file: str) -> list[dict[str, Any]]:
    return [{**record.model_dump(), "run": record.run} for record in load([ROOT / "results" / file]).records]


def records_of(device: str, name: str) -> list[dict[str, Any]]:
    return records_in(FILES[device][name])


def where(device: str, name: str) -> str:
    """The records of an experiment, the commits whose code they timed, on how many cards if not on one, and in which
    cells contenders did not take turns, or calls were taken apart."""
    records = records_of(device, name)
    commits = sorted({r["source"]["commit"][:7] for r in records if r["source"]["commit"]})
    said = f"Records: `results/{FILES[device][name]}`, of the code at commit {', '.join(commits)}"
    cards = {r["environment"]["chip"] for r in records if r["environment"].get("chip")}
    said += f", on {len(cards)} cards." if len(cards) > 1 else "."
    runs: dict[str, set[str]] = {}
    for record in (r for r in records if r["time_us"]):
        runs.setdefault(problem_label(record), set()).add(record["run"])
    if apart := [cell for cell, found in runs.items() if len(found) > 1]:
        said += f" In several runs, and so compared by the shares of their limits: {', '.join(apart)}."
    if overlapped := dict.fromkeys(problem_label(r) for r in records if r["overlap_us"]):
        cells = ", ".join(overlapped)
        said += f" Where calls overlapped a tiny kernel stands between those of all contenders: {cells}."
    return said


def against(records: list[dict[str, Any]]) -> str:
    """Summary and table of the fastest kernels of this project that are still here."""
    here = {kernel.label for kernel in registry.all_kernels()}
    live = [r for r in records if label(r) in here]
    return f"{summary(live)}\n\n{{heading}}{against_libraries(live)}\n"


def page(name: str) -> str:
    """The text of an experiment's page."""
    records = records_of(MAIN, name)
    table = against(records).format(heading="## The fastest kernel here against the library\n\n")
    return (
        f"{HEAD}\n# {name}\n\n{Device.get(MAIN).name}, {CACHES.get(name, DENSE)}, {METHOD}"
        f"\n\n{WHAT[name]} {where(MAIN, name)}\n\n{table}\n## All contenders\n\n{comparison(records)}\n"
    )


def device_page(device: str) -> str:
    """The text of a further device's page."""
    text = f"{HEAD}\n# {Device.get(device).name}\n\nUnless an experiment says otherwise {DENSE}; {METHOD}\n"
    for name in FILES[device]:
        table = against(records_of(device, name)).format(heading="")
        text += f"\n## {name}\n\n{WHAT[name]} {where(device, name)}\n\n{table}"
    return text


def gpus_page(device: str) -> str:
    """The text of the page about several GPUs of a device."""
    text = f"{HEAD}\n# Several {Device.get(device).name}\n\n{SEVERAL}\n"
    for name in OVER_GPUS[device]:
        text += f"\nRecords: `results/{name}`.\n\n{over_gpus(records_in(name))}\n"
    return text


def index() -> str:
    """The text of docs/results/README.md."""
    rows = "".join(f"- [{name}]({name}.md): {what}\n" for name, what in WHAT.items())
    others = "".join(f"- [{Device.get(name).name}]({name}.md): the same experiments\n" for name in OTHERS)
    several = "".join(
        f"- [Several {Device.get(name).name}]({name}-several.md): long requests, whose tokens they share\n"
        for name in OVER_GPUS
    )
    method = f"{Device.get(MAIN).name}, {DENSE} where a page names no other caches, {METHOD}"
    return f"{HEAD}\n# Results\n\n{method}\n\n{rows}{others}{several}"


def pages() -> dict[str, str]:
    """File name -> text of every page."""
    of_experiments = {f"{name}.md": page(name) for name in WHAT}
    further = {f"{name}.md": device_page(name) for name in OTHERS}
    several = {f"{name}-several.md": gpus_page(name) for name in OVER_GPUS}
    return {"README.md": index(), **of_experiments, **further, **several}


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
