#!/usr/bin/env python3
"""Writes down what a release of a serving engine asks of a plug-in, and says what changed since the one before.

    pip download --no-deps vllm==0.33.0
    scripts/engine_contracts.py vllm vllm-0.33.0-*.whl        # tests/engines/contracts/vllm-0.33.0.json

The wheel is read and nothing of it is run. Written down are the packages that it pins, and of what
`mla_var3.engines.<engine>` imports or derives from: signatures of functions, and of classes the bases, methods and
attributes. tests/engines/test_contracts.py holds the plug-in to them.
"""

from __future__ import annotations

import argparse
import ast
import json
import re
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
CONTRACTS = ROOT / "tests" / "engines" / "contracts"
#: Packages whose pins decide whether this package can be installed beside an engine.
PINNED = ("torch", "triton", "apache-tvm-ffi", "nvidia-cutlass-dsl", "torch-c-dlpack-ext", "pyelftools")
#: Classes whose fields a plug-in reads, beside what it imports.
READ = {
    "vllm": (
        "vllm.model_executor.layers.attention.mla_attention.MLACommonMetadata",
        "vllm.model_executor.layers.attention.mla_attention.MLACommonDecodeMetadata",
        "vllm.model_executor.layers.attention.mla_attention.MLACommonPrefillMetadata",
        "vllm.v1.attention.backends.mla.flashinfer_mla_sparse.FlashInferMLASparseMetadata",
    ),
    "sglang": (
        "sglang.srt.layers.attention.dsa_backend.DSAMetadata",
        "sglang.srt.layers.attention.flashmla_backend.FlashMLADecodeMetadata",
        "sglang.srt.layers.radix_attention.RadixAttention",
        "sglang.srt.model_executor.forward_batch_info.ForwardBatch",
    ),
}


def imported(engine: str) -> Iterator[str]:
    """Paths in the engine that its plug-in names: what it imports, and whole strings."""
    for file in sorted((ROOT / "src" / "mla_var3" / "engines" / engine).glob("*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == engine:
                yield from (f"{node.module}.{alias.name}" for alias in node.names)
            elif isinstance(node, ast.Constant) and re.fullmatch(rf"{engine}\.[\w.]+\.\w+", str(node.value)):
                yield node.value
    yield from READ.get(engine, ())


class Wheel:
    """The modules of a wheel, parsed when they are asked for."""

    def __init__(self, path: Path) -> None:
        self.files = zipfile.ZipFile(path)
        self.names = set(self.files.namelist())
        (about,) = (name for name in self.names if name.endswith(".dist-info/METADATA"))
        self.about = self.files.read(about).decode()
        self.modules: dict[str, ast.Module | None] = {}

    def module(self, name: str) -> ast.Module | None:
        if name not in self.modules:
            stem = name.replace(".", "/")
            file = next((x for x in (f"{stem}.py", f"{stem}/__init__.py") if x in self.names), None)
            self.modules[name] = None if file is None else ast.parse(self.files.read(file))
        return self.modules[name]

    def find(self, path: str) -> tuple[str, ast.stmt] | None:
        """(module, definition) of a path, followed through imports."""
        module, _, name = path.rpartition(".")
        tree = self.module(module)
        for node in ast.walk(tree) if tree else ():
            if isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name == name:
                return module, node
        for node in tree.body if tree else ():
            if isinstance(node, ast.Assign) and name in [ast.unparse(target) for target in node.targets]:
                return module, node
        for node in ast.walk(tree) if tree else ():
            if isinstance(node, ast.ImportFrom) and node.module and node.module != module:
                for alias in node.names:
                    if (alias.asname or alias.name) in (name, "*"):
                        at = self.find(f"{node.module}.{name if alias.name == '*' else alias.name}")
                        if at is not None:
                            return at
        return None


def signature(node: ast.FunctionDef) -> str:
    """Arguments of a function without annotations, "(self, q, out=None, **rest)"."""
    for argument in ast.walk(node.args):
        if isinstance(argument, ast.arg):
            argument.annotation = None
    return f"({ast.unparse(node.args)})"


def of_class(node: ast.ClassDef) -> dict[str, Any]:
    """Methods and attributes of a class; attributes of a class within it have its name in front."""
    methods, attributes = {}, []
    for part in node.body:
        if isinstance(part, ast.FunctionDef):
            marks = [ast.unparse(mark).split(".")[-1] for mark in part.decorator_list]
            methods[part.name] = {"arguments": signature(part), **({"marks": marks} if marks else {})}
        elif isinstance(part, ast.AnnAssign) and isinstance(part.target, ast.Name):
            attributes.append(part.target.id)
        elif isinstance(part, ast.Assign):
            attributes += [target.id for target in part.targets if isinstance(target, ast.Name)]
        elif isinstance(part, ast.ClassDef):
            attributes += [f"{part.name}.{name}" for name in of_class(part)["attributes"]]
    # What constructors make counts, too.
    init = next((x for x in node.body if isinstance(x, ast.FunctionDef) and x.name in ("__init__", "__new__")), None)
    for made in ast.walk(init) if init else ():
        if isinstance(made, ast.Attribute) and isinstance(made.ctx, ast.Store) and ast.unparse(made.value) == "self":
            attributes.append(made.attr)
    return {"methods": methods, "attributes": list(dict.fromkeys(attributes))}


def contract(engine: str, path: Path) -> dict[str, Any]:
    wheel = Wheel(path)
    (release,) = re.findall(r"^Version: (\S+)$", wheel.about, re.M)
    pins = {}
    for line in re.findall(r"^Requires-Dist: ([^;\n]+)$", wheel.about, re.M):
        name, rest = re.match(r"([\w.-]+)(.*)", line.strip()).groups()  # type: ignore[union-attr]
        if name.lower().replace("_", "-") in PINNED:
            pins[name.lower().replace("_", "-")] = re.sub(r"\[.*?\]", "", rest).strip()
    found: dict[str, Any] = {}
    todo = list(dict.fromkeys(imported(engine)))
    while todo:
        place = todo.pop(0)
        at = wheel.find(place)
        if place in found or at is None:
            continue
        module, node = at
        if isinstance(node, ast.FunctionDef):
            found[place] = {"arguments": signature(node)}
            continue
        if not isinstance(node, ast.ClassDef):
            found[place] = {"value": type(node.value).__name__.lower()}  # type: ignore[attr-defined]
            continue
        bases = []
        for base in node.bases:
            name = ast.unparse(base).split("[")[0]
            there = wheel.find(f"{module}.{name}")
            if there is not None and there[1] is not node:
                bases.append(f"{there[0]}.{name}")
        found[place] = {"bases": bases, **of_class(node)}
        todo += bases
    return {
        "engine": engine,
        "release": release,
        "pins": dict(sorted(pins.items())),
        "names": dict(sorted(found.items())),
    }


def flat(data: dict[str, Any]) -> dict[str, str]:
    """What can change, a line each."""
    lines = {f"pin {name}": pin for name, pin in data["pins"].items()}
    for name, entry in data["names"].items():
        if "bases" not in entry:
            lines[name] = entry.get("arguments") or entry["value"]
            continue
        lines[name] = "class of " + (", ".join(entry["bases"]) or "no base")
        for method, each in entry["methods"].items():
            lines[f"{name}.{method}"] = each["arguments"] + "".join(f" @{mark}" for mark in each.get("marks", ()))
        lines |= {f"{name}.{attribute}": "attribute" for attribute in entry["attributes"]}
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("engine", choices=sorted(READ))
    parser.add_argument("wheel", type=Path)
    args = parser.parse_args()
    made = contract(args.engine, args.wheel)
    others = [json.loads(file.read_text()) for file in CONTRACTS.glob(f"{args.engine}-*.json")]
    others = [data for data in others if data["release"] != made["release"]]
    others.sort(key=lambda data: [int(x) for x in re.findall(r"\d+", data["release"])])
    target = CONTRACTS / f"{args.engine}-{made['release']}.json"
    target.parent.mkdir(parents=True, exist_ok=True)
    lines = ",\n".join(f"  {json.dumps(k)}: {json.dumps(v)}" for k, v in made["names"].items())
    head = json.dumps({k: v for k, v in made.items() if k != "names"}, indent=1)[:-2]
    target.write_text(f'{head},\n "names": {{\n{lines}\n }}\n}}\n', encoding="utf-8")
    print(f"{len(made['names'])} classes and functions in {target.relative_to(ROOT)}")
    if others:
        before, after = flat(others[-1]), flat(made)
        for name in sorted({*before, *after}):
            if before.get(name) != after.get(name):
                print(f"{name}: {before.get(name, 'not there')} -> {after.get(name, 'gone')}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
