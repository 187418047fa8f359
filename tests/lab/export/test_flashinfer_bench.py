"""Definitions, workloads and solutions for flashinfer-bench: its rules, references that are right, tables that name
pages, solutions that call what is here."""

from __future__ import annotations

import ast
import json
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from mla_var3.catalogue.registry import KernelId
from mla_var3.cli._main import main
from mla_var3.errors import UserError
from mla_var3.lab.export import flashinfer_bench as fib
from mla_var3.workload import get

torch = pytest.importorskip("torch", reason="torch is not installed")

PROBLEMS = [
    get(name).problem.from_record(fields)
    for name, fields in (
        ("decode", {"b": 3, "t": 200, "h": 4, "k": 64, "p": 16, "page": 16, "lengths": [200, 0, 37]}),
        ("decode", {"b": 2, "s": 3, "t": 70, "h": 4, "k": 64, "p": 16, "page": 64, "causal": True, "lengths": [2, 70]}),
        ("decode", {"b": 2, "t": 70, "h": 4, "k": 64, "p": 16, "page": None, "dtype": "fp16"}),
        ("norm", {"rows": 5, "width": 96}),
        ("norm", {"rows": 5, "width": 96, "residual": True}),
        ("norm", {"rows": 5, "width": 96, "second": 32, "eps": 1e-3}),
        ("gemm", {"side": "q", "tokens": 5, "h": 3, "k": 64, "d": 32}),
        ("gemm", {"side": "out", "tokens": 5, "h": 3, "k": 64, "d": 32}),
        ("merge", {"parts": 3, "tokens": 7, "h": 4, "k": 64}),
    )
]


def inputs_of(form: fib.Form, device: str = "cpu") -> dict[str, Any]:
    """Inputs as that benchmark makes them: random, from the tables, or scalars."""
    torch.manual_seed(0)
    tables, sizes = form.tables(), {**form.const, **form.sizes}
    made: dict[str, Any] = {}
    for name, (shape, dtype) in form.inputs.items():
        if name in tables:
            made[name] = tables[name].to(device)
        elif shape is None:
            made[name] = form.scalars[name]
        else:
            made[name] = torch.randn([sizes[axis] for axis in shape], dtype=torch.float32).to(getattr(torch, dtype))
            made[name] = made[name].to(device)
        if shape is not None:
            assert list(made[name].shape) == [sizes[axis] for axis in shape], name
            assert made[name].dtype == getattr(torch, dtype), name
    return made


def run_of(text: str) -> Any:
    """The function `run` of a text."""
    space: dict[str, Any] = {}
    exec(compile(text, "exported", "exec"), space)
    return space["run"]


def results(form: fib.Form, inputs: Mapping[str, Any]) -> tuple[Any, ...]:
    found = run_of(fib.definition(form)["reference"])(*inputs.values())
    return found if isinstance(found, tuple) else (found,)


@pytest.mark.parametrize("problem", PROBLEMS, ids=lambda p: f"{p.workload}-{p.label}")
def test_references_are_the_oracles(problem: Any) -> None:
    form = fib.form_of(problem)
    inputs = inputs_of(form)
    if problem.workload == "merge":
        inputs["lse"][:, 3] = float("inf")  # a row without keys, and one with keys in one part alone
        inputs["lse"][1:, 4], inputs["partials"][1:, 4] = -float("inf"), float("nan")
    mine = results(form, inputs)
    given = [x for name, x in inputs.items() if name not in form.scalars]
    if problem.workload == "decode":
        given[1] = given[1].unsqueeze(2)  # the one head of the cache
    told = [x for x in get(problem.workload).reference(problem, *given) if x.numel()]
    told = [x[..., : mine[i].shape[-1]] for i, x in enumerate(told)]  # of a product, columns that belong to nobody
    if problem.workload == "norm" and problem.residual:
        assert torch.equal(mine[1].double(), told[1])
    assert len(mine) == len(told) == len(form.outputs)
    sizes = {**form.const, **form.sizes}
    for (name, (shape, dtype)), got, want in zip(form.outputs.items(), mine, told, strict=True):
        assert shape is not None and list(got.shape) == [sizes[axis] for axis in shape], name
        assert got.dtype == getattr(torch, dtype)
        torch.testing.assert_close(got.double(), want.double(), rtol=2e-2, atol=2e-3, msg=name)


@pytest.mark.parametrize("problem", PROBLEMS[:3], ids=lambda p: p.label)
def test_tables_name_a_page_of_its_own_for_every_one_that_is_used(problem: Any) -> None:
    tables = fib.form_of(problem).tables()
    assert tables["seq_lens"].tolist() == list(problem.seq_lens)
    used = [
        page
        for row, length in zip(tables["page_table"].tolist(), problem.seq_lens, strict=True)
        for page in row[: -(-length // problem.page_size)]
    ]
    assert len(set(used)) == len(used) and set(used) <= set(range(problem.num_pages))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What is written of all problems, and of two more that differ from the first in their sizes."""
    out = tmp_path_factory.mktemp("trace")
    more = [PROBLEMS[0].replace(lengths=(7, 8, 9)), PROBLEMS[0].replace(b=1, t=16, lengths="uniform")]
    kernels = [KernelId.parse(label) for label in ("triton/flash_mla", "triton/rmsnorm", "torch/flash_mla")]
    written = fib.write([*PROBLEMS, *more], kernels, out)
    assert (written.definitions, written.workloads, written.left_out) == (9, 11, {})
    return out


def test_files_are_as_that_benchmark_wants_them(folder: Path) -> None:
    """The rules of its models: names, axes, tensors, a function `run`, an entry file, inputs of every kind."""
    definitions = [json.loads(p.read_text()) for p in folder.glob("definitions/*/*.json")]
    assert len({d["name"] for d in definitions}) == len(definitions) == 9
    by_name = {d["name"]: d for d in definitions}
    for d in definitions:
        assert set(d["inputs"]).isdisjoint(d["outputs"])
        for tensor in (*d["inputs"].values(), *d["outputs"].values()):
            assert tensor["shape"] is None or set(tensor["shape"]) <= set(d["axes"])
            assert tensor["dtype"] in ("bfloat16", "float16", "float32", "int32")
        for axis in d["axes"].values():
            assert axis["type"] == "var" or (axis["type"] == "const" and axis["value"] > 0)
        (run,) = (n for n in ast.parse(d["reference"]).body if isinstance(n, ast.FunctionDef) and n.name == "run")
        assert [a.arg for a in run.args.args] == list(d["inputs"])
    ids = []
    for path in folder.glob("workloads/*/*.jsonl"):
        for line in path.read_text().splitlines():
            trace = json.loads(line)
            d, some = by_name[trace["definition"]], trace["workload"]
            assert path.stem == d["name"] and trace["solution"] is trace["evaluation"] is None
            ids.append(str(uuid.UUID(some["uuid"])))
            assert set(some["axes"]) == {name for name, axis in d["axes"].items() if axis["type"] == "var"}
            assert list(some["inputs"]) == list(d["inputs"])
            for name, spec in some["inputs"].items():
                scalar = d["inputs"][name]["shape"] is None
                assert spec["type"] == ("scalar" if scalar else spec["type"]) in ("random", "scalar", "safetensors")
                assert (spec["type"] == "safetensors") == (d["inputs"][name]["dtype"] == "int32")
                assert spec["type"] != "safetensors" or (folder / spec["path"]).is_file()
    assert len(ids) == len(set(ids)) == 11
    solutions = [json.loads(p.read_text()) for p in folder.glob("solutions/*/*/*/*.json")]
    assert len({s["name"] for s in solutions}) == len(solutions)
    for s in solutions:
        assert s["definition"] in by_name
        entry, function = s["spec"]["entry_point"].split("::")
        (source,) = (x["content"] for x in s["sources"] if x["path"] == entry)
        assert function == "run" and callable(run_of(source))
    asked = sorted(s["name"] for s in solutions if "s3_h4" in s["definition"])
    end = "mla_decode_s3_h4_k64_p16_page64_causal"
    assert asked == [f"mla_var3_{who}_{end}" for who in ("dispatch", "torch_flash_mla", "triton_flash_mla")]


def test_that_benchmark_reads_them(folder: Path) -> None:
    data = pytest.importorskip("flashinfer_bench.data", reason="flashinfer-bench is not installed")
    found = data.TraceSet.from_path(str(folder))
    assert len(found.definitions) == 9 and sum(map(len, found.workloads.values())) == 11


def test_tables_are_read_by_safetensors(folder: Path) -> None:
    st = pytest.importorskip("safetensors.torch", reason="safetensors is not installed")
    form = fib.form_of(PROBLEMS[0])
    lines = (folder / "workloads" / "mla_paged" / f"{form.name}.jsonl").read_text().splitlines()
    assert len(lines) == 3
    place = json.loads(lines[0])["workload"]["inputs"]["page_table"]["path"]
    read = st.load_file(folder / place)
    assert set(read) == {"page_table", "seq_lens"}
    assert all(torch.equal(read[name], tensor) for name, tensor in form.tables().items())


def test_the_same_problem_has_the_same_files(folder: Path, tmp_path: Path) -> None:
    fib.write(PROBLEMS[:1], [], tmp_path)
    for path in tmp_path.rglob("*.safetensors"):
        assert path.read_bytes() == (folder / path.relative_to(tmp_path)).read_bytes()


@pytest.mark.parametrize(
    ("workload", "fields", "sentence"),
    [
        (
            "layer",
            {},
            "workload layer has no form in flashinfer-bench's files: problems of decode, gemm,",
        ),
        ("decode", {"tree": True, "s": 4}, "an exported problem of decode has no field tree: leave it out"),
        ("decode", {"h_kv": 2}, "an exported problem of decode has no field h_kv"),
        ("decode", {"b": 2, "queries": [1, 2]}, "an exported problem of decode has no field queries"),
    ],
)
def test_what_has_no_form_is_refused(workload: str, fields: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UserError) as caught:
        fib.form_of(get(workload).problem.from_record(fields))
    assert sentence in str(caught.value)


def test_the_verb(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    words = ["export", "--format", "flashinfer-bench", "--out", str(out)]
    assert main([*words, "triton/flash_mla", "--batch", "8q1s1k", "--h", "16"]) == 0
    assert capsys.readouterr().out == f"{out}: 1 definitions, 1 workloads, 2 solutions\n"
    (line,) = (out / "workloads" / "mla_paged").glob("*.jsonl")
    assert json.loads(line.read_text())["workload"]["axes"] == {"batch_size": 8, "num_pages": 128, "max_pages": 16}
    assert main([*words, "--experiment", "nightly"]) == 0
    said = capsys.readouterr()
    assert said.out == f"{out}: 10 definitions, 18 workloads, 10 solutions\n"
    assert "left out: b128_h128_t4096, b8_h128_t32768, b32_h16_t4096: workload layer has no form" in said.err
    for more, sentence in (
        (["--experiment", "nightly", "--b", "3"], "leave the options of a problem out"),
        (["--device", "h200"], "--device says which records, and flashinfer-bench is given none"),
        (["triton/rope_append"], "workload rope has no form in flashinfer-bench's files"),
    ):
        assert main([*words, *more]) == 2
        assert sentence in capsys.readouterr().err


@pytest.mark.gpu
@pytest.mark.parametrize("kernel", [None, "triton"])
@pytest.mark.parametrize("problem", [p for p in PROBLEMS if p.dtype == "bf16"], ids=lambda p: f"{p.workload}-{p.label}")
def test_solutions_compute_what_references_do(problem: Any, kernel: str | None) -> None:
    wide = {"k": 512, "p": 64, "h": 16, "page": 64} if problem.workload == "decode" else {}
    problem = problem.replace(**wide)
    design = {"decode": "flash_mla", "norm": "rmsnorm", "gemm": "absorb_gemm", "merge": "merge_partials"}
    version = KernelId.parse(f"{kernel}/{design[problem.workload]}") if kernel else None
    form = fib.form_of(problem)
    inputs = inputs_of(form, "cuda")
    (source,) = fib.solution(form, version)["sources"]
    found = run_of(source["content"])(*inputs.values())
    for got, want in zip(found if isinstance(found, tuple) else (found,), results(form, inputs), strict=True):
        torch.testing.assert_close(got.float(), want.float(), rtol=2e-2, atol=1e-2)
