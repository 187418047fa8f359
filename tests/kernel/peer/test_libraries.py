"""Peers that are absent say so and how to get them; peers that are here are found without importing them."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from mla_var3.catalogue import libraries, registry
from mla_var3.device import Device
from mla_var3.errors import Unsupported
from mla_var3.workload import Problem, get
from mla_var3.workload.decode import MlaProblem
from mla_var3.workload.prefill import PrefillProblem
from mla_var3.workload.sparse_decode import SparseProblem

PEERS = [k for k in registry.all_kernels() if k.language == "peer"]
PREFILL = ("fa3", "fa4", "cudnn_sdpa", "flashinfer_ragged")
#: Peers that do not attend, and their workloads.
OTHERS = {
    **dict.fromkeys(("torch_compile_rmsnorm", "quack_rmsnorm", "flashinfer_rmsnorm"), "norm"),
    **dict.fromkeys(("torch_compile_rope_append", "flashinfer_rope_append"), "rope"),
    **dict.fromkeys(("torch_topk", "flashinfer_topk", "sglang_topk"), "topk"),
    "torch_compile_merge_partials": "merge",
    "cublas_bmm": "gemm",
    "fa3_chunked": "chunked_prefill",
    **dict.fromkeys(("flash_mla_layer", "torch_compile_mla_layer"), "layer"),
    "deep_gemm": "indexer_logits",
    **dict.fromkeys(("flash_mla_sparse", "fa3_sparse", "flashinfer_sparse"), "sparse_decode"),
}


def _problem(name: str) -> Problem:
    if name in PREFILL:
        return PrefillProblem(b=2, s=128, causal=True)
    if name in OTHERS:
        problem: Problem = get(OTHERS[name]).problem()
        return problem
    return MlaProblem(b=2, t=256, dtype="fp16" if name == "tilelang_mla" else "bf16")


@pytest.fixture
def nothing_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(libraries, "fetched_dirs", list)
    monkeypatch.setattr(libraries, "package_dirs", lambda name: [])


@pytest.fixture
def nothing_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(libraries, "package_dirs", lambda name: [])


def test_registry_and_finder_name_the_same_peers() -> None:
    assert {k.design for k in PEERS} == set(libraries.PEERS)
    assert all(k.layer == _problem(k.design).layer and k.version == 0 for k in PEERS)


@pytest.mark.parametrize("kernel", PEERS, ids=lambda k: k.design)
def test_an_absent_peer_gives_its_reason_and_a_way_to_get_it(kernel: registry.KernelId, nothing_here: None) -> None:
    reason = registry.missing(kernel)
    assert reason is not None
    assert kernel.label in reason and "which is not here" in reason
    assert re.search(r"pip install|fetch_peers|install", reason.split(":", 1)[1])
    assert reason.count(".") >= 1 and reason.endswith(".") and "\n" not in reason
    # A sweep skips it with the same sentence, on a device that could run it.
    plan_type = registry.get_plan(kernel)
    verdict = Device.get("h200").can_run(plan_type.requires, _problem(kernel.design))
    assert not verdict and verdict.reason == reason
    with pytest.raises(Unsupported, match="which is not here"):
        plan_type(_problem(kernel.design)).plan()


def test_the_language_itself_is_not_missing() -> None:
    assert registry.missing("peer") is None
    assert registry.missing(registry.KernelId("torch", "mla", "flash_mla")) is None


@pytest.mark.parametrize("kernel", PEERS, ids=lambda k: k.design)
def test_each_peer_declares_what_it_does(kernel: registry.KernelId) -> None:
    plan_type = registry.get_plan(kernel)
    assert plan_type.peer == kernel.design  # type: ignore[attr-defined]
    assert isinstance(plan_type.allocates, bool)  # type: ignore[attr-defined]
    assert plan_type.workload.name == _problem(kernel.design).workload
    assert set(plan_type.leaves_out) <= set(plan_type.workload.case_names)  # type: ignore[attr-defined]


def test_a_fetched_file_is_found_with_its_provenance(fetched: Callable[..., Path]) -> None:
    path = fetched("vllm/_flashmla_C.abi3.so", version="0.25.1", origin="a wheel")
    library = libraries.find("flash_mla_vllm")
    assert library is not None
    assert (library.path, library.version, library.origin) == (path, "0.25.1", "a wheel")
    assert library.to_record() == {
        "peer": "flash_mla_vllm",
        "kind": "extension",
        "version": "0.25.1",
        "origin": "a wheel",
    }
    assert libraries.find("fa3_qv") is None, "another file of the same wheel is another peer"


def test_a_record_says_which_libraries_were_there(fetched: Callable[..., Path], nothing_installed: None) -> None:
    from mla_var3.measure.environment import describe

    assert "peers" not in describe()
    fetched("vllm/_flashmla_C.abi3.so", version="0.25.1", origin="a wheel")
    assert describe()["peers"] == dict.fromkeys(("flash_mla_vllm", "flash_mla_layer"), "0.25.1, a wheel")


def test_tilelang_is_found_with_an_example_of_ones_own(
    tmp_path: Path, fetched: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    own, installed = tmp_path / "own.py", tmp_path / "installed" / "tilelang"
    own.write_text("")
    monkeypatch.setenv(libraries.TILELANG_EXAMPLE, str(own))
    monkeypatch.setattr(libraries, "package_dirs", lambda name: [])
    assert libraries.find("tilelang_mla") is None, "the example alone is not enough"
    monkeypatch.setattr(libraries, "package_dirs", lambda name: [installed] if name == "tilelang" else [])
    library = libraries.find("tilelang_mla")
    assert library is not None and library.path == own and libraries.tilelang_packages(library) is None
    monkeypatch.setenv(libraries.TILELANG_EXAMPLE, str(tmp_path / "nowhere.py"))
    assert libraries.find("tilelang_mla") is None
    monkeypatch.delenv(libraries.TILELANG_EXAMPLE)
    checkout = installed.parent / "examples" / "deepseek_mla" / "example_mla_decode_paged.py"
    checkout.parent.mkdir(parents=True)
    checkout.write_text("")
    library = libraries.find("tilelang_mla")
    assert library is not None and library.path == checkout
    fetched("tilelang/example_mla_decode_paged.py", origin="given")
    library = libraries.find("tilelang_mla")
    assert library is not None and library.origin == "TileLang's example, given"


def test_an_installed_package_is_found_and_not_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "flash_mla"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('imported')")
    (package / "flash_mla_interface.py").write_text("")
    monkeypatch.syspath_prepend(str(tmp_path))
    library = libraries.find("flash_mla_lib")
    assert library is not None and library.kind == "package"


@pytest.mark.parametrize(
    ("problem", "word"),
    [
        ({"k": 256}, "columns"),
        ({"h": 4, "h_kv": 2}, "h_kv = 2"),
        ({"page": 16}, "pages of 64"),
        ({"dtype": "fp32"}, "fp32"),
    ],
)
def test_a_problem_that_a_library_does_not_compute_is_refused(
    problem: dict[str, object], word: str, fetched: Callable[..., Path]
) -> None:
    fetched("vllm/_flashmla_C.abi3.so")
    plan_type = registry.get_plan(registry.KernelId("peer", "mla", "flash_mla_vllm"))
    assert plan_type.requires.accepts(MlaProblem(b=2, t=256))
    verdict = plan_type.requires.accepts(MlaProblem(b=2, t=256, **problem))  # type: ignore[arg-type]
    assert not verdict and word in verdict.reason


@pytest.mark.parametrize(
    ("name", "problem", "words"),
    [
        ("flash_mla_sparse", {}, ""),
        ("flash_mla_sparse", {"h": 5, "page": 3, "topk": 7, "lengths": True, "sink": True}, ""),
        ("flash_mla_sparse", {"layout": "v4", "extra": 9, "extra_page": 2, "extra_lengths": True}, ""),
        ("flash_mla_sparse", {"layout": "flat"}, "takes layouts v32 and v4; the problem has flat"),
        ("flash_mla_sparse", {"layout": "bf16"}, "the problem has bf16"),
        ("flash_mla_sparse", {"h": 129}, "takes up to 128 heads; the problem has 129"),
        ("flash_mla_sparse", {"extra": 64}, "takes an extra cache in layout v4 only"),
        ("fa3_sparse", {}, ""),
        ("fa3_sparse", {"layout": "bf16", "h": 200, "page": 3, "topk": 7, "lengths": True}, ""),
        ("fa3_sparse", {"layout": "v4"}, "takes layout bf16, and v32 converted; the problem has v4"),
        ("fa3_sparse", {"layout": "flat"}, "the problem has flat"),
        ("fa3_sparse", {"sink": True}, "takes no attention sinks in float32"),
        ("fa3_sparse", {"extra": 64}, "takes one cache"),
        ("flashinfer_sparse", {"layout": "bf16"}, ""),
        ("flashinfer_sparse", {"sink": True}, "peer/flashinfer_sparse takes no attention sinks in float32"),
    ],
)
def test_a_sparse_problem_is_taken_or_refused(
    name: str, problem: dict[str, object], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(libraries._LOOK, name, lambda: libraries.Library(name, "package", Path(), "1", "an imitation"))
    verdict = registry.get_plan(registry.KernelId("peer", "mla", name)).requires.accepts(
        SparseProblem(**problem)  # type: ignore[arg-type]
    )
    assert bool(verdict) == (not words)
    assert words in verdict.reason
    assert not words or verdict.reason.startswith(f"peer/{name} takes")


@pytest.mark.parametrize(
    ("name", "problem", "words"),
    [
        ("fa3", {"t": 300, "lengths": "normal", "h_kv": 2, "strided_kv": True, "d": 256, "p": 0}, ""),
        ("fa3", {"d": 256}, "takes keys of up to 256 columns, a multiple of 8; the problem has 320"),
        ("fa4", {"lengths": "lognormal", "h_kv": 2}, ""),
        ("fa4", {"d": 60, "p": 0}, "the problem has 60"),
        ("cudnn_sdpa", {}, ""),
        ("cudnn_sdpa", {"lengths": "normal"}, "takes requests of one length; the problem's differ"),
        ("cudnn_sdpa", {"t": 300}, "the problem has 128 queries and 300 keys"),
        ("cudnn_sdpa", {"t": 300, "causal": False}, ""),
        ("flashinfer_ragged", {"lengths": "normal", "h_kv": 2}, ""),
    ],
)
def test_a_prompt_is_taken_or_refused(
    name: str, problem: dict[str, object], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(libraries._LOOK, name, lambda: libraries.Library(name, "package", Path(), "1", "an imitation"))
    fields = {"b": 2, "s": 128, "h": 4, "causal": True, **problem}
    verdict = registry.get_plan(registry.KernelId("peer", "mla", name)).requires.accepts(
        PrefillProblem(**fields)  # type: ignore[arg-type]
    )
    assert bool(verdict) == (not words) and words in verdict.reason


def test_one_library_is_behind_two_peers(fetched: Callable[..., Path], nothing_installed: None) -> None:
    path = fetched("vllm/vllm_flash_attn/_vllm_fa3_C.abi3.so")
    dense, sparse = libraries.find("fa3_qv"), libraries.find("fa3_sparse")
    assert dense is not None and sparse is not None
    assert dense.path == sparse.path == path and (dense.peer, sparse.peer) == ("fa3_qv", "fa3_sparse")
    assert libraries.find("flash_mla_sparse") is None


def test_decode_is_refused_by_peers_that_prefill() -> None:
    plan_type = registry.get_plan(registry.KernelId("peer", "mla", "cudnn_sdpa"))
    verdict = plan_type.requires.accepts(MlaProblem(b=2, t=256))
    assert verdict.reason == "the kernel computes prefill; the problem is one of decode"


def test_finding_loads_nothing_heavy(repo_root: Path) -> None:
    code = (
        "import sys\nfrom mla_var3.catalogue import registry\n"
        "[registry.missing(k) for k in registry.all_kernels()]\n"
        "print([m for m in ('torch', 'triton', 'cutlass', 'vllm', 'flashinfer', 'numpy') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=repo_root / "src", text=True, capture_output=True, check=False
    )
    assert done.stdout.strip() == "[]", done.stdout + done.stderr
