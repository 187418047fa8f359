"""scripts/fetch_peers.py without an index: the lock, the hashes, what is kept, what is left out, the pack."""

from __future__ import annotations

import hashlib
import io
import json
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from mla_var3.errors import UserError


@pytest.fixture(scope="module")
def script(repo_root: Path, module_at: Callable[[Path], Any]) -> ModuleType:
    return module_at(repo_root / "scripts" / "fetch_peers.py")


def _entry(path: Path) -> dict[str, str]:
    return {"version": "1.0", "filename": path.name, "sha256": hashlib.sha256(path.read_bytes()).hexdigest()}


@pytest.fixture
def world(script: ModuleType, tmp_path: Path) -> Any:
    """A lock and a cache with small wheels of the right names."""
    cache = tmp_path / "cache"
    cache.mkdir()
    members = {
        "vllm": {
            "vllm/_flashmla_C.abi3.so": b"one",
            "vllm/vllm_flash_attn/_vllm_fa3_C.abi3.so": b"two",
            "vllm/a.py": b"",
        },
        "flash-attn-4": {"flash_attn/cute/interface.py": b"x = 1\n"},
        "quack-kernels": {"quack/__init__.py": b""},
        "einops": {"einops/__init__.py": b""},
        "flashinfer-python": {"flashinfer/data/csrc/batch_mla_config.jinja": b"{{ dtype_q }}"},
        "apache-tvm-ffi": {
            "tvm_ffi/__init__.py": b"from . import cpp\nhere = 1\n",
            "tvm_ffi/cpp/__init__.py": b"",
            "tvm_ffi/include/a.h": b"",
        },
        "tilelang": {
            "tilelang/__init__.py": b"",
            "tilelang/src/tl_templates/cuda/copy.h": b"",
            "tilelang/src/op/copy.cc": b"",
            "tilelang/3rdparty/tvm/src/ir.cc": b"",
            "tilelang/3rdparty/tvm/python/tvm/__init__.py": b"",
        },
        "z3-solver": {"z3/lib/libz3.so": b"z3", "z3/include/z3.h": b"", "z3_solver-1.0.data/data/bin/z3": b""},
        "apache-tvm-ffi (tilelang)": {"tvm_ffi/__init__.py": b"older = 1\n"},
        "cloudpickle": {"cloudpickle/__init__.py": b""},
        "ml-dtypes": {"ml_dtypes/__init__.py": b""},
        "psutil": {"psutil/__init__.py": b""},
        "tqdm": {"tqdm/__init__.py": b""},
    }
    wheels = {}
    for name, files in members.items():
        path = cache / f"{name.replace('-', '_').replace(' ', '_')}-1.0-py3-none-any.whl"
        with zipfile.ZipFile(path, "w") as archive:
            for member, content in files.items():
                archive.writestr(member, content)
        wheels[name] = _entry(path)
    sources = cache / "tilelang-1.0.tar.gz"
    with tarfile.open(sources, "w:gz") as archive:
        member = tarfile.TarInfo(f"tilelang-1.0/{script.EXAMPLE}")
        member.size = len(b"the example")
        archive.addfile(member, io.BytesIO(b"the example"))
    wheels["tilelang (sources)"] = _entry(sources)
    lock = tmp_path / "lock.json"
    lock.write_text(json.dumps({"cuda": "cu13", "versions": {}, "targets": {"py3.12-cu13": wheels}}))
    options = SimpleNamespace(nvcc="no-such-nvcc", tilelang_example=None, flash_mla=None, deep_gemm=None)

    def fetcher(**changes: Any) -> Any:
        given = {"python": "3.12", "cuda": "cu13", "options": options, **changes}
        return script.Fetcher(tmp_path / "peers", cache, given["python"], given["cuda"], lock, given["options"])

    return SimpleNamespace(fetcher=fetcher, cache=cache, lock=lock, folder=tmp_path / "peers", tmp=tmp_path)


def test_the_lock_pins_every_wheel_by_hash(script: ModuleType) -> None:
    data = json.loads(script.LOCK.read_text())
    wheels = script.read_lock(script.LOCK, "3.12", "cu13")
    assert set(wheels) == set(data["versions"])
    for target in data["targets"].values():
        for name, entry in target.items():
            assert entry["version"] == data["versions"][name]
            assert len(entry["sha256"]) == 64 and int(entry["sha256"], 16)
            ending = ".tar.gz" if name.endswith("(sources)") else ".whl"
            assert entry["version"] in entry["filename"] and entry["filename"].endswith(ending)
            assert entry["filename"].lower().replace("_", "-").startswith(script.distribution(name))
    for source in script.SOURCES.values():
        assert set(source.wheels) <= set(wheels)


def test_peers_of_the_script_and_of_the_package_agree(script: ModuleType) -> None:
    from mla_var3.catalogue import libraries

    assert set(script.SOURCES) == set(libraries.PEERS)


def test_another_python_or_cuda_is_named(script: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    assert script.main(["fa4", "--cuda", "cu11"]) == 2
    assert "no files for py3.12-cu11: did you mean 'py3.12-cu13'" in capsys.readouterr().err
    assert script.main(["fa9"]) == 2
    assert "did you mean 'fa4'" in capsys.readouterr().err


def test_only_the_objects_are_kept_and_found(world: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from mla_var3.catalogue import libraries

    assert world.fetcher().fetch(["flash_mla_vllm", "fa3_qv"], strict=True) == {"flash_mla_vllm": "", "fa3_qv": ""}
    package = world.folder / "site" / "mla_var3_peers"
    kept = sorted(str(x.relative_to(package)) for x in package.rglob("*") if x.is_file())
    assert kept == ["manifest.json", "vllm/_flashmla_C.abi3.so", "vllm/vllm_flash_attn/_vllm_fa3_C.abi3.so"]
    entry = json.loads((package / "manifest.json").read_text())["files"]["vllm/_flashmla_C.abi3.so"]
    assert entry == {
        "version": "1.0",
        "origin": "vllm-1.0-py3-none-any.whl",
        "sha256": hashlib.sha256(b"one").hexdigest(),
    }
    monkeypatch.syspath_prepend(str(world.folder / "site"))
    library = libraries.find("fa3_qv")
    assert library is not None and library.version == "1.0" and library.path.read_bytes() == b"two"


def test_activate_puts_the_site_on_the_path(world: Any) -> None:
    world.fetcher().fetch(["fa4"], strict=True)
    command = f". {world.folder}/activate && echo $PYTHONPATH"
    done = subprocess.run(
        ["bash", "-c", command], text=True, capture_output=True, check=True, env={"PATH": "/usr/bin:/bin"}
    )
    assert done.stdout.strip() == str(world.folder / "site")
    assert (world.folder / "site" / "flash_attn" / "cute" / "interface.py").is_file()


def test_the_loader_is_a_fallback(script: ModuleType, world: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """FlashInfer's object brings TVM-FFI, which is used where none is installed."""
    options = SimpleNamespace(nvcc="true", tilelang_example=None, flash_mla=None, deep_gemm=None)
    monkeypatch.setattr(script.Fetcher, "_build", lambda *args, **kwargs: None)
    world.fetcher(options=options).fetch(["flashinfer_fa3"], strict=True)
    assert not (world.folder / "fallback/tvm_ffi/include").exists(), "headers stay behind"
    code = "import tvm_ffi; print(tvm_ffi.here)"
    done = subprocess.run([sys.executable, "-c", code], cwd=world.folder / "fallback", capture_output=True, check=False)
    assert done.stdout.strip() == b"1", done.stderr

    from mla_var3.catalogue import libraries
    from mla_var3.kernel.peer import mla_flashinfer

    monkeypatch.setattr(sys, "path", [*sys.path, str(world.folder / "site")])
    monkeypatch.setattr(libraries, "package_dirs", lambda name: [])
    monkeypatch.delitem(sys.modules, "tvm_ffi", raising=False)
    monkeypatch.setattr(mla_flashinfer, "import_module", lambda name: list(sys.path))
    assert mla_flashinfer._tvm_ffi()[-1] == str(world.folder / "fallback")
    monkeypatch.setattr(libraries, "package_dirs", lambda name: [world.tmp])
    monkeypatch.setattr(sys, "path", sys.path[:-1])
    assert str(world.folder / "fallback") not in mla_flashinfer._tvm_ffi()


def test_a_second_fetch_keeps_what_the_first_one_got(world: Any) -> None:
    world.fetcher().fetch(["flash_mla_vllm"], strict=True)
    world.fetcher().fetch(["fa3_qv"], strict=True)
    files = json.loads((world.folder / "site/mla_var3_peers/manifest.json").read_text())["files"]
    assert len(files) == 2


def test_a_wheel_of_another_hash_is_refused_before_it_is_unpacked(world: Any) -> None:
    wheel = world.cache / "vllm-1.0-py3-none-any.whl"
    wheel.write_bytes(wheel.read_bytes() + b" ")
    with pytest.raises(UserError, match=r"has SHA-256 .*, the lock says .*: delete it"):
        world.fetcher().fetch(["fa3_qv"], strict=True)
    assert not (world.folder / "site/mla_var3_peers/vllm").exists()


def test_a_wheel_without_the_file_is_another_release(world: Any) -> None:
    wheel = world.cache / "vllm-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("vllm/other.so", b"")
    data = json.loads(world.lock.read_text())
    data["targets"]["py3.12-cu13"]["vllm"]["sha256"] = hashlib.sha256(wheel.read_bytes()).hexdigest()
    world.lock.write_text(json.dumps(data))
    with pytest.raises(UserError, match="the lock names another release"):
        world.fetcher().fetch(["fa3_qv"], strict=True)


def test_downloading_asks_pip_for_the_hash(script: ModuleType, world: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    wheel = world.cache / "einops-1.0-py3-none-any.whl"
    content = wheel.read_bytes()
    wheel.unlink()
    asked: list[str] = []

    def pip(*arguments: str) -> str:
        asked.extend(arguments)
        asked.append(Path(arguments[-1]).read_text())
        wheel.write_bytes(content)
        return ""

    monkeypatch.setattr(script, "_pip", pip)
    assert world.fetcher().wheel("einops") == wheel
    assert "--require-hashes" in asked and "--no-deps" in asked
    assert asked[-1] == f"einops==1.0 --hash=sha256:{hashlib.sha256(content).hexdigest()}\n"


def test_what_cannot_be_had_is_left_out_with_its_reason(script: ModuleType, world: Any) -> None:
    result = world.fetcher().fetch(list(script.SOURCES), strict=False)
    assert [peer for peer, reason in result.items() if not reason] == [
        "flash_mla_vllm",
        "fa3_qv",
        "fa4",
        "tilelang_mla",
        "quack_rmsnorm",
        "cudnn_sdpa",
        "cublas_bmm",
        "torch_compile_rmsnorm",
        "torch_compile_rope_append",
        "torch_compile_merge_partials",
        "torch_compile_mla_layer",
        "flash_mla_layer",
        "flash_mla_sparse",
        "fa3_sparse",
        "fa3",
        "fa3_chunked",
        "flashinfer_sparse",
        "flashinfer_rmsnorm",
        "flashinfer_rope_append",
        "flashinfer_ragged",
        "torch_topk",
    ]
    assert "no-such-nvcc" in result["flashinfer_fa3"]
    assert "name it with --flash-mla" in result["flash_mla_lib"]
    with pytest.raises(UserError, match="name it with --flash-mla"):
        world.fetcher().fetch(["flash_mla_lib"], strict=True)


def test_tilelang_comes_with_its_own_packages(world: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from mla_var3.catalogue import libraries

    world.fetcher().fetch(["tilelang_mla"], strict=True)
    home = world.folder / "site/mla_var3_peers/tilelang"
    kept = sorted(str(x.relative_to(home)) for x in home.rglob("*") if x.is_file())
    assert kept == [
        "example_mla_decode_paged.py",
        "fallback/cloudpickle/__init__.py",
        "fallback/ml_dtypes/__init__.py",
        "fallback/psutil/__init__.py",
        "fallback/tqdm/__init__.py",
        "packages/tilelang/3rdparty/tvm/python/tvm/__init__.py",
        "packages/tilelang/__init__.py",
        "packages/tilelang/src/tl_templates/cuda/copy.h",
        "packages/tvm_ffi/__init__.py",
        "packages/z3/lib/libz3.so",
    ]
    assert (home / "packages/tvm_ffi/__init__.py").read_text() == "older = 1\n"
    monkeypatch.syspath_prepend(str(world.folder / "site"))
    library = libraries.find("tilelang_mla")
    assert library is not None and library.path.read_text() == "the example" and library.version == "1.0"
    assert library.origin == "examples/deepseek_mla/example_mla_decode_paged.py of tilelang-1.0.tar.gz"
    assert libraries.tilelang_packages(library) == home / "packages"


def test_another_example_of_tilelang(script: ModuleType, world: Any) -> None:
    mine = world.tmp / "mine.py"
    mine.write_text("my own")
    options = SimpleNamespace(nvcc="no-such-nvcc", tilelang_example=str(mine), flash_mla=None, deep_gemm=None)
    world.fetcher(options=options).fetch(["tilelang_mla"], strict=True)
    home = world.folder / "site/mla_var3_peers"
    assert (home / "tilelang/example_mla_decode_paged.py").read_text() == "my own"
    entry = json.loads((home / "manifest.json").read_text())["files"]["tilelang/example_mla_decode_paged.py"]
    assert entry["origin"] == f"mine.py, SHA-256 {hashlib.sha256(b'my own').hexdigest()[:12]}"
    options.tilelang_example = str(world.tmp / "nowhere.py")
    with pytest.raises(UserError, match="there is no file"):
        world.fetcher(options=options).fetch(["tilelang_mla"], strict=True)


def test_sources_without_the_example_are_another_release(script: ModuleType, world: Any) -> None:
    with tarfile.open(world.cache / "tilelang-1.0.tar.gz", "w:gz"):
        pass
    data = json.loads(world.lock.read_text())
    data["targets"]["py3.12-cu13"]["tilelang (sources)"] = _entry(world.cache / "tilelang-1.0.tar.gz")
    world.lock.write_text(json.dumps(data))
    with pytest.raises(UserError, match=r"tilelang-1\.0\.tar\.gz has no .*: the lock names another release"):
        world.fetcher().fetch(["tilelang_mla"], strict=True)


SETUP = """\
import os, sys
from setuptools import setup

home = os.environ["CUDA_HOME"]
if os.environ.get("BREAKS"):
    sys.exit("fatal error: no such header")
with open("flash_mla/flash_mla_interface.py", "w") as file:
    file.write(repr([home, os.environ["CPATH"], os.environ["FLASH_MLA_DISABLE_SM100"]]))
setup(name="flash_mla", version="1.0.0+abc", packages=["flash_mla"])
"""


@pytest.fixture
def checkout(world: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A checkout that looks like FlashMLA's, a toolkit, and options that name them."""
    folder, toolkit = world.tmp / "FlashMLA", world.tmp / "cuda"
    for name, text in {"setup.py": SETUP, "flash_mla/__init__.py": "", "csrc/cutlass/include/cute.hpp": ""}.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    (toolkit / "include/cccl").mkdir(parents=True)
    (toolkit / "include/cuda_runtime.h").write_text("")
    monkeypatch.setenv("CUDA_HOME", str(toolkit))
    monkeypatch.delenv("CPATH", raising=False)
    options = SimpleNamespace(nvcc="no-such-nvcc", tilelang_example=None, flash_mla=str(folder), deep_gemm=str(folder))
    return SimpleNamespace(folder=folder, toolkit=toolkit, options=options)


HERE = f"{sys.version_info.major}.{sys.version_info.minor}"


def _for_this_python(world: Any) -> None:
    data = json.loads(world.lock.read_text())
    data["targets"][f"py{HERE}-cu13"] = data["targets"]["py3.12-cu13"]
    world.lock.write_text(json.dumps(data))


def test_flash_mla_is_built_by_its_own_setup(world: Any, checkout: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from mla_var3.catalogue import libraries

    _for_this_python(world)
    stale = world.folder / "site/flash_mla/old.py"
    stale.parent.mkdir(parents=True)
    stale.write_text("")
    world.fetcher(python=HERE, options=checkout.options).fetch(["flash_mla_lib"], strict=True)
    built = (world.folder / "site/flash_mla/flash_mla_interface.py").read_text()
    include = checkout.toolkit / "include"
    assert built == repr([str(checkout.toolkit), f"{include / 'cccl'}:{include}", "1"])
    assert not stale.exists(), "of an earlier build nothing stays"
    assert not (checkout.folder / "flash_mla/flash_mla_interface.py").exists(), "the checkout is not written to"
    monkeypatch.syspath_prepend(str(world.folder / "site"))
    library = libraries.find("flash_mla_lib")
    assert library is not None and library.version == "1.0.0+abc" and library.kind == "package"


def test_what_flash_mla_needs_is_said(world: Any, checkout: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    _for_this_python(world)

    def error(python: str = HERE) -> str:
        with pytest.raises(UserError) as caught:
            world.fetcher(python=python, options=checkout.options).fetch(["flash_mla_lib"], strict=True)
        return str(caught.value)

    monkeypatch.setenv("BREAKS", "1")
    assert "pip wheel failed: " in error() and "no such header" in error()
    other = "3.12" if HERE != "3.12" else "3.11"
    world_lock = json.loads(world.lock.read_text())
    world_lock["targets"].setdefault(f"py{other}-cu13", world_lock["targets"]["py3.12-cu13"])
    world.lock.write_text(json.dumps(world_lock))
    assert f"is built for Python {other} by that Python; this is {HERE}" in error(other)
    monkeypatch.setenv("CUDA_HOME", str(world.tmp))
    assert "is not a CUDA toolkit with its headers: set CUDA_HOME" in error()
    (checkout.folder / "csrc/cutlass/include/cute.hpp").unlink()
    (checkout.folder / "csrc/cutlass/include").rmdir()
    assert "without its submodule: git clone --recursive" in error()


def test_the_pack_unpacks_to_the_same_files(script: ModuleType, world: Any) -> None:
    world.fetcher().fetch(["flash_mla_vllm", "fa4"], strict=True)
    target = world.tmp / "deep" / "peers.tar.xz"
    size = script.pack(world.folder, target)
    assert size == target.stat().st_size
    with tarfile.open(target) as archive:
        archive.extractall(world.tmp / "there", filter="data")
    for path in world.folder.rglob("*"):
        if path.is_file():
            assert (world.tmp / "there" / path.relative_to(world.folder)).read_bytes() == path.read_bytes()


def test_fresh_never_empties_a_folder_of_something_else(
    script: ModuleType, world: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    other = world.tmp / "mine"
    other.mkdir()
    (other / "thesis.txt").write_text("years of work")
    arguments = ["cudnn_sdpa", "--fresh", "--dir", str(other), "--lock", str(world.lock), "--cache", str(world.cache)]
    assert script.main(arguments) == 2
    assert "not emptied" in capsys.readouterr().err and (other / "thesis.txt").exists()


def test_help_says_how_to_use_it_on_the_other_machine(script: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        script.main(["--help"])
    assert "activate" in capsys.readouterr().out
