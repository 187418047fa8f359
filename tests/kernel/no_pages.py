"""Decoding from a cache of no pages, which no request has tokens in: a process of its own, for Triton's interpreter."""

from __future__ import annotations

import json
import sys
from typing import Any

import torch

from mla_var3.catalogue import registry
from mla_var3.catalogue.registry import KernelId
from mla_var3.check.judge import compare
from mla_var3.workload import get, problem_from_record
from mla_var3.workload.sparse_decode import input_names

DECODE: dict[str, Any] = {"b": 2, "h": 16, "t": 130}
SPARSE: dict[str, Any] = {"workload": "sparse_decode", "b": 2, "h": 16, "t": 130, "topk": 40}
PROBLEMS: list[dict[str, Any]] = [
    DECODE,
    {**DECODE, "page": 16},
    *({**SPARSE, "layout": layout} for layout in ("v32", "v4", "flat", "bf16")),
    {**SPARSE, "layout": "v4", "extra": 24, "extra_t": 60, "extra_page": 5},
    {**SPARSE, "topk": 2048, "paged": True},
    {**SPARSE, "topk": 2048, "layout": "v4", "paged": True},
]
KERNELS = [k for k in registry.all_kernels() if k.layer == "mla" and k.language != "peer"]


def takes(kernel: KernelId, record: dict[str, Any]) -> bool:
    """Whether a version is here, and takes a problem."""
    return not registry.missing(kernel) and bool(
        registry.get_plan(kernel).requires.accepts(problem_from_record(record))
    )


def wrong(kernel: KernelId, record: dict[str, Any], device: str) -> str:
    """What is wrong with a version's results, or ""; of two caches, also where the extra one alone has no pages."""
    problem = problem_from_record(record)
    workload, plan = get(problem.workload), registry.get_plan(kernel)(problem)
    sparse = problem.workload == "sparse_decode"
    names = list(input_names(problem)) if sparse else ["q", "cache", "page_table", "seq_lens"]
    caches = [name for name in names if name.endswith("cache")]
    for empty in [caches, caches[1:]] if caches[1:] else [caches]:
        inputs = dict(zip(names, plan.prepare_inputs(device, seed=3), strict=True))
        for name in empty:
            inputs[name] = inputs[name][:0]
            if "seq_lens" in inputs:
                inputs["seq_lens"].zero_()
            else:
                inputs[name.replace("cache", "indices")].fill_(-1)
        out, lse = plan.plan(*inputs.values())()
        nothing = bool((out == 0).all()) and bool(torch.isposinf(lse).all())
        if nothing != (empty == caches):
            return f"{empty} without pages: out up to {out.abs().max():g}, lse from {lse.min():g}"
        verdict = compare(
            workload, (out, lse), workload.reference(problem, *inputs.values()), workload.bounds("normal")
        )
        if not verdict:
            return f"{empty} without pages: {verdict.reason}"
    return ""


if __name__ == "__main__":
    mine = [(k, p) for k in KERNELS if k.language == sys.argv[1] for p in PROBLEMS if takes(k, p)]
    print(json.dumps([[k.label, p, wrong(k, p, "cpu")] for k, p in mine]))
