"""The plug-ins of serving engines against what the engines' releases ask of them, without an engine.

`contracts/` is written by scripts/engine_contracts.py from the engines' wheels. What runs is read as source.
"""

from __future__ import annotations

import ast
import json
import logging
import re
import sys
import tomllib
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

import mla_var3

CONTRACTS = Path(__file__).parent / "contracts"
RELEASES = {file.stem: json.loads(file.read_text(encoding="utf-8")) for file in sorted(CONTRACTS.glob("*.json"))}
ENGINES = Path(mla_var3.__file__).parent / "engines"
REGISTRY = "vllm.v1.attention.backends.registry"
CONVERTS = "vllm.v1.attention.backends.mla.sparse_utils.triton_convert_req_index_to_global_index"
#: What a plug-in reads of objects that it is handed: the class, and its fields in each release, or a release.
FIELDS = {
    "MLACommonMetadata": ("decode", "num_decodes", "max_query_len", "query_start_loc"),
    "MLACommonDecodeMetadata": ("block_table", "seq_lens"),
    "MLACommonPrefillMetadata": ("query_start_loc",),
    "MLACommonPrefillMetadata 0.25.1": ("ChunkedContextMetadata.cu_seq_lens",),
    "MLACommonPrefillMetadata 0.33.0": ("ContextChunk.query_start_loc", "ContextChunk.cu_seq_lens"),
    "FlashInferMLASparseMetadata": ("req_id_per_token", "block_table", "block_size", "seq_lens"),
    "FlashInferMLASparseMetadata 0.25.1": ("query_start_loc", "num_actual_tokens"),
    "FlashInferMLASparseMetadataBuilder": ("req_id_per_token_buffer", "topk_tokens"),
    "FlashMLADecodeMetadata": ("block_kv_indices", "seq_lens_k"),
    "FlashMLABackend": ("kv_lora_rank", "num_draft_tokens", "is_fp8_kvcache", "num_local_heads", "token_to_kv_pool"),
    "DeepseekSparseAttnBackend": (
        "dsa_kv_cache_store_fp8",
        "kv_cache_dim",
        "physical_page_size",
        "dsa_topk_backend",
        "use_fused_topk",
        "dsa_index_kpool",
        "hisparse_coordinator",
    ),
    "DSAMetadata": ("dsa_cache_seqlens_int32",),
    "RadixAttention": ("tp_q_head_num", "head_dim", "v_head_dim", "scaling", "k_scale", "layer_id"),
    "ForwardBatch": ("batch_size", "seq_lens", "forward_mode"),
    "AttentionImplBase": ("need_to_return_lse_for_decode", "num_heads", "scale"),
}


def sources(engine: str) -> dict[str, ast.Module]:
    return {file.name: ast.parse(file.read_text(encoding="utf-8")) for file in (ENGINES / engine).glob("*.py")}


def imported(tree: ast.Module, engine: str) -> dict[str, str]:
    """Names of a file that come from the engine, and their paths in it."""
    return {
        alias.asname or alias.name: f"{node.module}.{alias.name}"
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == engine
        for alias in node.names
    }


def chain(names: dict[str, Any], path: str) -> list[dict[str, Any]]:
    """A class of the engine and those that it is derived from."""
    entry = names[path]
    if "bases" not in entry:
        return []
    return [entry, *(each for base in entry["bases"] if base in names for each in chain(names, base))]


def plug_in(contract: dict[str, Any]) -> Iterator[tuple[str, ast.ClassDef, list[dict[str, Any]]]]:
    """Each class that is derived from one of the engine, with what that one and its bases have."""
    engine, names = contract["engine"], contract["names"]
    for file, tree in sources(engine).items():
        known = imported(tree, engine)
        for node in tree.body:
            if not isinstance(node, ast.ClassDef) or not node.bases:
                continue
            base = ast.unparse(node.bases[0]).split("[")[0]
            path = known.get(base)
            if base.endswith("()"):  # what differs between releases
                paths = re.findall(rf"\"({engine}\.[\w.]+)\"", (ENGINES / engine / "releases.py").read_text())
                (path,) = [path for path in paths if path in names]
            if path is not None:
                yield file, node, chain(names, path)


def of(text: str) -> ast.arguments:
    return ast.parse(f"def f{text}: ...").body[0].args  # type: ignore[attr-defined]


def takes(ours: ast.arguments, theirs: ast.arguments) -> str:
    """What a call with the engine's arguments would lack in ours, and the other way round; "" where it fits."""
    names = [x.arg for x in (*ours.posonlyargs, *ours.args, *ours.kwonlyargs)]
    asked = [x.arg for x in (*theirs.posonlyargs, *theirs.args, *theirs.kwonlyargs)]
    lacking = [name for name in asked if name not in names]
    if lacking and ours.kwarg is None:
        return f"lacks {lacking}"
    needed = [x.arg for x in ours.args[: len(ours.args) - len(ours.defaults)]]
    more = [name for name in needed if name not in asked]
    return f"asks for {more}" if more else ""


@pytest.mark.parametrize("release", RELEASES)
def test_what_is_imported_is_there(release: str) -> None:
    contract = RELEASES[release]
    for file, tree in sources(contract["engine"]).items():
        for path in imported(tree, contract["engine"]).values():
            assert path in contract["names"], f"{file} imports {path}, which {release} has not"


@pytest.mark.parametrize("release", RELEASES)
def test_classes_have_the_methods_and_arguments_of_the_engine(release: str) -> None:
    found = list(plug_in(RELEASES[release]))
    assert found
    for file, node, bases in found:
        where = f"{file}: {node.name} in {release}"
        ours = {part.name: part for part in node.body if isinstance(part, ast.FunctionDef)}
        concrete, compared = set(ours), {"__init__"}
        for base in bases:
            for name, method in base["methods"].items():
                marks = method.get("marks", [])
                if name in ours and name not in compared:
                    compared.add(name)
                    kind = {ast.unparse(mark) for mark in ours[name].decorator_list}
                    assert kind >= {mark for mark in marks if mark in ("staticmethod", "classmethod", "property")}, (
                        where
                    )
                    wrong = takes(ours[name].args, of(method["arguments"]))
                    assert not wrong, f"{where}: {name} {wrong}"
                if "abstractmethod" not in marks:
                    concrete.add(name)
                assert name in concrete, f"{where}: {name} is abstract and not there"


def test_what_is_overridden_is_asked_for_by_some_release() -> None:
    known: dict[tuple[str, str], set[str]] = {}
    own: dict[tuple[str, str], set[str]] = {}
    for contract in RELEASES.values():
        for _, node, bases in plug_in(contract):
            key = contract["engine"], node.name
            for base in bases:
                known.setdefault(key, set()).update(base["methods"], base["attributes"])
            own[key] = {part.name for part in node.body if isinstance(part, ast.FunctionDef)}
            for part in node.body:
                targets = part.targets if isinstance(part, ast.Assign) else [getattr(part, "target", None)]
                own[key] |= {target.id for target in targets if isinstance(target, ast.Name)}
    for key, names in own.items():
        assert names <= known[key], f"{key}: {names - known[key]} overrides nothing"


@pytest.mark.parametrize("release", RELEASES)
def test_fields_that_are_read_are_there(release: str) -> None:
    contract = RELEASES[release]
    for what, fields in FIELDS.items():
        name, _, only = what.partition(" ")
        for path in contract["names"]:
            if path.endswith(f".{name}") and only in ("", contract["release"]):
                there = {each for base in chain(contract["names"], path) for each in base["attributes"]}
                assert there, what
                assert set(fields) <= there, f"{path} of {release} has no {set(fields) - there}"


def test_each_release_that_is_known_has_its_contract() -> None:
    from mla_var3.engines import sglang
    from mla_var3.engines.vllm import releases

    assert [f"sglang-{version}" for version in sglang.RELEASES] == [x for x in RELEASES if x.startswith("sglang-")]

    assert [f"vllm-{known.version}" for known in releases.RELEASES] == [x for x in RELEASES if x.startswith("vllm-")]
    for known in releases.RELEASES:
        names = RELEASES[f"vllm-{known.version}"]["names"]
        assert known.sparse_impl in names
        assert known.counts == ("valid_counts_out" in names[CONVERTS]["arguments"])
        assert known.names == ("register" in names[f"{REGISTRY}.AttentionBackendEnum"]["methods"])
        assert known.sparse_init == (
            "abstractmethod" not in names[known.sparse_impl]["methods"]["__init__"].get("marks", "")
        )


@pytest.mark.parametrize("release", RELEASES)
def test_the_package_can_be_installed_beside_the_engine(release: str, repo_root: Path) -> None:
    """What an engine pins is allowed by the package, and from the release on that pins CuTe DSL 4.8 by [cute] too."""
    project = tomllib.loads((repo_root / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    asked = [Requirement(text) for text in project["dependencies"]]
    pins = RELEASES[release]["pins"]
    if pins["nvidia-cutlass-dsl"].startswith("==4.8."):
        asked += [Requirement(text) for text in project["optional-dependencies"]["cute"]]
    checked = [
        requirement.specifier.contains(pin.removeprefix("=="))
        for requirement in asked
        if (pin := pins.get(requirement.name)) and SpecifierSet(pin)
    ]
    assert len(checked) >= 2 and all(checked), pins


@pytest.fixture
def hear(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> Callable[[logging.Logger], None]:
    """Has caplog hear a logger, whatever an earlier test left: Hydra disables the loggers that it finds and lets root
    pass errors alone, and vLLM keeps what its loggers say from root."""

    def heard(logger: logging.Logger) -> None:
        monkeypatch.setattr(logger, "disabled", False)
        monkeypatch.setattr(logger, "propagate", False)
        monkeypatch.setattr(logger, "handlers", [caplog.handler])
        caplog.set_level(logging.WARNING, logger.name)

    return heard


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_a_plug_in_never_stops_a_server(
    engine: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    hear: Callable[[logging.Logger], None],
) -> None:
    """Without the engine it depends on, as with one whose registries are others."""
    monkeypatch.setitem(sys.modules, engine, None)
    plug_in = import_module(f"mla_var3.engines.{engine}")
    hear(plug_in._logger)
    plug_in.register()
    assert "The backends of mla_var3 are not available: " in caplog.text


def test_a_backend_that_cannot_be_used_is_one_line_of_the_log(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, hear: Callable[[logging.Logger], None]
) -> None:
    from mla_var3.engines import told

    reason = "cute-dsl needs nvidia-cutlass-dsl 4.8.0 or later, and 4.5.2 is installed: uninstall it."
    monkeypatch.setattr("mla_var3.engines.told.registry.missing", lambda language: reason)
    hear(logging.getLogger("vllm.mla_var3"))
    told.missing.cache_clear()
    for _ in range(2):
        assert told.missing("vllm.mla_var3", "MLA_VAR3") == reason
    told.missing.cache_clear()
    assert [x.getMessage() for x in caplog.records] == [f"MLA_VAR3 of mla_var3 does not serve: {reason}"]


def test_a_release_that_is_not_known_is_taken_for_the_nearest(monkeypatch: pytest.MonkeyPatch) -> None:
    from mla_var3.engines.vllm import releases

    for here, nearest in (("0.25.1", "0.25.1"), ("0.26.0rc1", "0.25.1"), ("0.32", "0.33.0"), ("1.0.0+cu130", "0.33.0")):
        releases.release.cache_clear()
        monkeypatch.setattr(releases, "installed", lambda here=here: here)
        assert releases.release().version == nearest
        known = "which knows 0.25.1, 0.33.0: it is taken for"
        assert releases.unknown() == (
            "" if here == nearest else f"vLLM {here} is not known to mla_var3, {known} {nearest}."
        )
    releases.release.cache_clear()
