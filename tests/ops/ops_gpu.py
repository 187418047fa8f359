"""What the GPU tests of this folder share: compiling ahead, results against the oracle, requests cut out of a batch."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from mla_var3.check.judge import ErrorReport, compare
from mla_var3.device import Device
from mla_var3.ops import mla_decode
from mla_var3.ops.ways import way_for
from mla_var3.workload import Bound
from mla_var3.workload.decode import WORKLOAD, MlaProblem, fifth_input, mla_decode_reference

FLASH_MLA_SCALE = 576**-0.5
#: Problems of test_cpp_example.py.
CPP = [MlaProblem(b=4, h=h, t=4096) for h in (16, 128)]
#: Problems of test_jax_gpu.py: bundles for it are made where there is no jax.
JAX = [
    MlaProblem(b=4, h=16, t=2000, lengths=[2000, 0, 129, 64]),
    MlaProblem(b=3, h=128, t=700, lengths=[700, 65, 1]),
    MlaProblem(b=2, h=128, s=2, causal=True, t=300, lengths=[300, 65]),
    MlaProblem(b=3, h=16, causal=True, t=300, lengths=[300, 65, 20], queries=[1, 7, 4]),
    MlaProblem(b=2, h=16, s=4, t=300, lengths=[300, 65], tree=True),
]


def compile_ahead(problems: Iterable[MlaProblem], *, fixed_split: int | None = None) -> int:
    """Compiles, in processes beside each other, what will be picked for these problems; returns how many jobs it took.

    One class takes one core about 5 s; without this, a test would wait for each in turn. Where the compiler is missing
    the kernels must be in an open bundle, and nothing is done.
    """
    from mla_var3.catalogue.jobs import CompileJob, compile_all
    from mla_var3.toolchain import loader
    from mla_var3.toolchain.aot import code_knobs

    device = Device.detect()
    assert device is not None
    if not loader.compiler_here():
        return 0
    jobs: dict[Any, CompileJob] = {}
    wanted: list[tuple[Any, Any]] = []
    for problem in problems:
        way = way_for(problem, device, fixed_split=fixed_split)
        wanted.append((way.key[0], way.make(problem, device)))
    for kernel, plan in wanted:
        if kernel.language != "cute-dsl":
            continue
        key = (kernel, plan.problem.problem_class(), str(code_knobs(plan.tiling)), plan.plan_empty().functions)
        record = plan.problem.to_record()
        record.pop("softmax_scale", None)
        jobs.setdefault(
            key, CompileJob(**kernel.to_record(), problem=record, device=device.key, tiling=plan.tiling.to_record())
        )
    results = compile_all(list(jobs.values()), workers=max(1, min(len(jobs), os.cpu_count() or 1)), progress=False)
    failed = [f"{r.job.label}: {r.error}" for r in results if not r.ok]
    assert not failed, failed
    return len(jobs)


def decode(problem: MlaProblem, given: Sequence[torch.Tensor], **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, lse) of `mla_decode` on a problem's inputs, of which a fifth is cu_seqlens_q or a mask."""
    fifth = {name: x.bool() if name == "mask" else x for name, x in fifth_input(*given).items()}
    return mla_decode(*given[:4], causal=problem.causal, return_lse=True, **fifth, **options)


def judge(
    found: Sequence[torch.Tensor],
    given: Sequence[torch.Tensor],
    scale: float,
    causal: bool,
    bounds: dict[str, Bound],
) -> ErrorReport:
    """(out, lse) against the oracle on the same inputs, of which a fifth is cu_seqlens_q or a mask."""
    options: dict[str, Any] = {"k": found[0].shape[-1], "scale": scale, "causal": causal}
    reference = mla_decode_reference(*given[:4], **options, **fifth_input(*given))
    return compare(WORKLOAD, found, reference, bounds)


def request(given: Sequence[torch.Tensor], i: int, width: int | None = None) -> tuple[torch.Tensor, ...]:
    """One request by itself, its row of the page table cut to a width."""
    q, cache, table, lens = given
    return q[i : i + 1].contiguous(), cache, table[i : i + 1, :width].contiguous(), lens[i : i + 1].contiguous()


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors hold the same bits, +0 and -0 told apart."""
    kinds = {2: torch.int16, 4: torch.int32}
    return torch.equal(a.contiguous().view(kinds[a.element_size()]), b.contiguous().view(kinds[b.element_size()]))
