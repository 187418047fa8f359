"""Definitions, workloads and solutions as flashinfer-bench has them: a folder that its `TraceSet.from_path` reads.

    definitions/<op_type>/<definition>.json                     what is computed: axes, tensors, a reference in torch
    workloads/<op_type>/<definition>.jsonl                      a problem a line: values of the variable axes
    blob/workloads/<op_type>/<definition>/<uuid>.safetensors    page tables and lengths, which cannot be random
    solutions/mla_var3/<op_type>/<definition>/<solution>.json   a version, as a file that calls this package

A definition is a problem without its sizes: heads and widths are constants of it, requests, tokens and pages are axes.
`FORMS` has what can be exported, a row a workload. A tensor is contiguous there, where rows of a problem here may lie
apart.
"""

from __future__ import annotations

import inspect
import json
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mla_var3 import __version__
from mla_var3.catalogue import registry
from mla_var3.errors import UserError
from mla_var3.files import write_whole
from mla_var3.lab.export import references
from mla_var3.ops.captured import safetensors
from mla_var3.workload import TORCH_DTYPES

if TYPE_CHECKING:
    from mla_var3.catalogue.registry import KernelId
    from mla_var3.workload import Problem
    from mla_var3.workload.decode import MlaProblem
    from mla_var3.workload.gemm import GemmProblem
    from mla_var3.workload.merge import MergeProblem
    from mla_var3.workload.norm import NormProblem

AUTHOR = "mla_var3"
#: Names of workloads are from this namespace, so that the same problem has the same one in every export.
_SPACE = uuid.UUID("6d6c615f-7661-5233-8000-000000000000")

#: Shape (names of axes, or None of a scalar) and dtype.
Spec = tuple[tuple[str, ...] | None, str]


@dataclass(frozen=True)
class Form:
    """What of a problem goes into the three kinds of file.

    name: of its definition. const, sizes: axes with their values; sizes differ among workloads of a definition. inputs:
    in order; scalars: values of those that are no tensors. call: how `run` calls the reference, whose function has
    more arguments than inputs; solve: the body of a solution's `run`, where KERNEL stands for a version or None.
    tables: makes the inputs that cannot be random.
    """

    name: str
    op_type: str
    what: str
    const: Mapping[str, int]
    sizes: Mapping[str, int]
    inputs: Mapping[str, Spec]
    outputs: Mapping[str, Spec]
    reference: Callable[..., Any]
    call: str
    solve: str
    scalars: Mapping[str, float] = field(default_factory=dict)
    tables: Callable[[], Mapping[str, Any]] = dict


def form_of(problem: Problem) -> Form:
    """The form of a problem; a `UserError` where its workload has none, or has none for such a problem."""
    make = FORMS.get(problem.workload)
    if make is None:
        raise UserError(
            f"workload {problem.workload} has no form in flashinfer-bench's files: problems of {', '.join(FORMS)} have "
            "one."
        )
    return make(problem)


def _refuse(problem: Problem, *fields: str) -> None:
    """Refuses a problem in which one of these fields is set to something that the form has no place for."""
    default = type(problem)()
    for name in fields:
        if getattr(problem, name) != getattr(default, name):
            raise UserError(f"an exported problem of {problem.workload} has no field {name}: leave it out.")


def _dtype(problem: Problem) -> str:
    """What the name of a definition says of a dtype."""
    return "" if problem.dtype == "bf16" else f"_{problem.dtype}"


# ---------------------------------------------------------------- the forms
def _decode(pd: MlaProblem) -> Form:
    _refuse(pd, "h_kv", "strided_pages", "queries", "tree", "strided", "strided_out")
    dtype, page = TORCH_DTYPES[pd.dtype], pd.page_size
    masked = "_causal" if pd.causal else ""
    call = f"decode(q, kv_cache, page_table, seq_lens, scale, k={pd.k}, causal={pd.causal})"

    def tables() -> Mapping[str, Any]:
        import torch

        # A page of its own for every entry that is used, in random order: the same every time.
        used = [-(-length // page) for length in pd.seq_lens]
        order = torch.randperm(pd.num_pages, generator=torch.Generator().manual_seed(1)).tolist()
        table = torch.zeros((pd.b, pd.max_pages), dtype=torch.int32)
        for i, count in enumerate(used):
            table[i, :count] = torch.tensor(order[sum(used[:i]) : sum(used[: i + 1])], dtype=torch.int32)
        return {"page_table": table, "seq_lens": torch.tensor(pd.seq_lens, dtype=torch.int32)}

    return Form(
        name=f"mla_decode_s{pd.s}_h{pd.h}_k{pd.k}_p{pd.p}_page{page}{masked}{_dtype(pd)}",
        op_type="mla_paged",
        what=f"Absorbed Multi-head Latent Attention of {pd.s} query tokens a request over a paged cache of {pd.k} "
        f"latent and {pd.p} rope columns{', causal' if pd.causal else ''}. lse is the natural log-sum-exp.",
        const={
            "num_query_tokens": pd.s, "num_heads": pd.h, "latent_columns": pd.k, "columns": pd.k + pd.p,
            "page_size": page,
        },
        sizes={"batch_size": pd.b, "num_pages": pd.num_pages, "max_pages": pd.max_pages},
        inputs={
            "q": (("batch_size", "num_query_tokens", "num_heads", "columns"), dtype),
            "kv_cache": (("num_pages", "page_size", "columns"), dtype),
            "page_table": (("batch_size", "max_pages"), "int32"),
            "seq_lens": (("batch_size",), "int32"),
            "scale": (None, "float32"),
        },
        outputs={
            "out": (("batch_size", "num_query_tokens", "num_heads", "latent_columns"), dtype),
            "lse": (("batch_size", "num_heads", "num_query_tokens"), "float32"),
        },
        reference=references.decode,
        call=call,
        solve=f"mla_decode(q, kv_cache, page_table, seq_lens, scale=scale, causal={pd.causal}, head_dim_v={pd.k}, "
        "return_lse=True, kernel=KERNEL)",
        scalars={"scale": pd.scale},
        tables=tables,
    )  # fmt: skip


def _norm(pd: NormProblem) -> Form:
    dtype = TORCH_DTYPES[pd.dtype]
    const, rows = {"width": pd.width}, ("num_rows", "width")
    inputs: dict[str, Spec] = {"x": (rows, dtype), "weight": (("width",), dtype)}
    outputs: dict[str, Spec] = {"out": (rows, dtype)}
    reference: Callable[..., Any] = references.rmsnorm
    name, given, more, behind = f"rmsnorm_w{pd.width}", "", "", ""
    if pd.residual:
        behind = ", behind the addition of a residual"
        inputs["residual"], outputs["new_residual"] = (rows, dtype), (rows, dtype)
        reference, given = references.rmsnorm_residual, "residual, "
        more, name = "residual=residual, ", f"{name}_residual"
    elif pd.second:
        behind = f" and of the {pd.second} behind them"
        const |= {"second_width": pd.second, "columns": pd.width + pd.second}
        inputs["x"] = (("num_rows", "columns"), dtype)
        inputs["second_weight"] = (("second_width",), dtype)
        outputs["second"] = (("num_rows", "second_width"), dtype)
        reference, given = references.rmsnorm_second, "second_weight, "
        more, name = "second_weight=second_weight, ", f"{name}_{pd.second}"
    inputs["eps"] = (None, "float32")
    return Form(
        name=name + _dtype(pd),
        op_type="rmsnorm",
        what=f"RMSNorm of rows of {pd.width} columns{behind}.",
        const=const,
        sizes={"num_rows": pd.rows},
        inputs=inputs,
        outputs=outputs,
        reference=reference,
        call=f"{reference.__name__}(x, weight, {given}eps)",
        solve=f"rmsnorm(x, weight, {more}eps=eps, kernel=KERNEL)",
        scalars={"eps": pd.eps},
    )  # fmt: skip


def _gemm(pd: GemmProblem) -> Form:
    dtype = TORCH_DTYPES[pd.dtype]
    before, after = ("head_dim", "latent_columns") if pd.side == "q" else ("latent_columns", "head_dim")
    return Form(
        name=f"absorb_gemm_{pd.side}_h{pd.h}_d{pd.d}_k{pd.k}{_dtype(pd)}",
        op_type="gemm",
        what="A product per head around absorbed attention: "
        + ("queries into latent space." if pd.side == "q" else "the latent output out of it."),
        const={"num_heads": pd.h, "head_dim": pd.d, "latent_columns": pd.k, "weight_rows": pd.h * 2 * pd.d},
        sizes={"num_tokens": pd.tokens},
        inputs={
            "x": (("num_tokens", "num_heads", before), dtype),
            "weight": (("weight_rows", "latent_columns"), dtype),
        },
        outputs={"out": (("num_tokens", "num_heads", after), dtype)},
        reference=references.absorb_gemm,
        call=f'absorb_gemm(x, weight, side="{pd.side}")',
        solve=f'absorb_gemm(x, weight, "{pd.side}", kernel=KERNEL)',
    )


def _merge(pd: MergeProblem) -> Form:
    dtype = TORCH_DTYPES[pd.dtype]
    return Form(
        name=f"merge_partials_n{pd.parts}_k{pd.k}{_dtype(pd)}",
        op_type="merge_state",
        what=f"Attention over {pd.parts} parts of a sequence, from each part's output and natural log-sum-exp.",
        const={"num_parts": pd.parts, "latent_columns": pd.k},
        sizes={"num_rows": pd.rows},
        inputs={
            "partials": (("num_parts", "num_rows", "latent_columns"), dtype),
            "lse": (("num_parts", "num_rows"), "float32"),
        },
        outputs={"out": (("num_rows", "latent_columns"), dtype), "total": (("num_rows",), "float32")},
        reference=references.merge_partials,
        call="merge_partials(partials, lse)",
        solve="merge_partials(partials, lse, kernel=KERNEL)",
    )


#: Workload -> the form of a problem of it.
FORMS: Mapping[str, Callable[[Any], Form]] = {"decode": _decode, "gemm": _gemm, "merge": _merge, "norm": _norm}


# ---------------------------------------------------------------- the three kinds of file
def definition(form: Form) -> dict[str, Any]:
    """A `Definition`."""
    axes: dict[str, Any] = {name: {"type": "var"} for name in form.sizes}
    axes |= {name: {"type": "const", "value": value} for name, value in form.const.items()}

    def specs(tensors: Mapping[str, Spec]) -> dict[str, Any]:
        return {
            name: {"shape": None if shape is None else list(shape), "dtype": dtype}
            for name, (shape, dtype) in tensors.items()
        }

    names = ", ".join(form.inputs)
    return {
        "name": form.name,
        "description": form.what,
        "op_type": form.op_type,
        "tags": [f"author:{AUTHOR}"],
        "axes": axes,
        "inputs": specs(form.inputs),
        "outputs": specs(form.outputs),
        "reference": f"{_HEAD}\n\n{inspect.getsource(form.reference)}\n\ndef run({names}):\n    return {form.call}\n",
    }


_HEAD = "from typing import Any"


def workload(form: Form, problem: Problem, folder: Path) -> dict[str, Any]:
    """A workload's `Trace`, and its tables written below `folder`."""
    name = str(uuid.uuid5(_SPACE, json.dumps(problem.to_record(), sort_keys=True)))
    inputs: dict[str, Any] = {}
    tables = form.tables()
    place = f"blob/workloads/{form.op_type}/{form.name}/{name}.safetensors"
    if tables:
        write_whole(folder / place, safetensors(tables))
    for tensor in form.inputs:
        if tensor in form.scalars:
            inputs[tensor] = {"type": "scalar", "value": form.scalars[tensor]}
        elif tensor in tables:
            inputs[tensor] = {"type": "safetensors", "path": place, "tensor_key": tensor}
        else:
            inputs[tensor] = {"type": "random"}
    made = {"uuid": name, "axes": dict(form.sizes), "inputs": inputs}
    return {"definition": form.name, "solution": None, "workload": made, "evaluation": None}


def solution(form: Form, kernel: KernelId | None) -> dict[str, Any]:
    """A `Solution`: the dispatcher's pick, or a version."""
    names, function = ", ".join(form.inputs), form.solve.partition("(")[0]
    label = None if kernel is None else kernel.label
    content = (
        f"from mla_var3.ops import {function}\n\nKERNEL = {json.dumps(label) if label else None}\n\n\n"
        f"def run({names}):\n    return {form.solve}\n"
    )
    who = "dispatch" if kernel is None else label
    return {
        "name": f"{AUTHOR}_{str(who).replace('/', '_').replace('-', '_')}_{form.name}",
        "definition": form.name,
        "author": AUTHOR,
        "description": f"{who} of mla-var3 {__version__}, which has to be installed where this runs.",
        "spec": {
            "language": "python",
            "target_hardware": ["cuda"],
            "entry_point": "main.py::run",
            "dependencies": ["mla-var3"],
            "destination_passing_style": False,
        },
        "sources": [{"path": "main.py", "content": content}],
    }


# ---------------------------------------------------------------- all of it
@dataclass
class Written:
    """How many of each kind were written, and the problems that were not, by the reason."""

    definitions: int = 0
    workloads: int = 0
    solutions: int = 0
    left_out: dict[str, list[str]] = field(default_factory=dict)


def write(problems: Iterable[Problem], kernels: Sequence[KernelId], folder: Path) -> Written:
    """Writes the definitions of the problems, each problem as a workload, and of each definition the dispatcher and
    those of the versions that compute it and take one of its problems, as solutions.

    Files of the same names are replaced. Raises `UserError` where no problem has a form.
    """
    written = Written()
    groups: dict[str, list[tuple[Form, Problem]]] = {}
    for problem in problems:
        try:
            form = form_of(problem)
        except UserError as error:
            written.left_out.setdefault(str(error), []).append(problem.label)
        else:
            groups.setdefault(form.name, []).append((form, problem))
    if not groups:
        raise UserError(" ".join(written.left_out) or "there is no problem to export: name one.")
    for name, some in groups.items():
        form = some[0][0]
        _write(folder / "definitions" / form.op_type / f"{name}.json", definition(form))
        lines = [json.dumps(workload(one, problem, folder)) for one, problem in some]
        write_whole(folder / "workloads" / form.op_type / f"{name}.jsonl", "".join(f"{line}\n" for line in lines))
        fitting = [k for k in kernels if any(_takes(k, problem) for _, problem in some)]
        for kernel in (None, *fitting):
            made = solution(form, kernel)
            _write(folder / "solutions" / AUTHOR / form.op_type / name / f"{made['name']}.json", made)
            written.solutions += 1
        written.definitions += 1
        written.workloads += len(lines)
    return written


def _takes(kernel: KernelId, problem: Problem) -> bool:
    plan = registry.get_plan(kernel)
    return plan.workload.name == problem.workload and bool(plan.requires.accepts(problem))


def _write(path: Path, data: Mapping[str, Any]) -> None:
    write_whole(path, json.dumps(data, indent=2) + "\n")
