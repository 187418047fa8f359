#!/usr/bin/env python3
"""Adds to records that were made before digests which code they timed, by compiling the commit that each names.

    scripts/digest_past_records.py --dry-run              # what there is to compile
    scripts/digest_past_records.py                        # of every version that is here
    PYTHONPATH=DIR scripts/digest_past_records.py triton/flash_mla    # pip install --no-deps --target DIR triton==3.6.0
    scripts/digest_past_records.py cute-dsl/flash_mla --at 57449ce61851    # for records whose commit is not here, or
                                                                           # had another source: it came later

The commit's own package compiles its version for the record's problem, tiling and device, in a process of its own; the
digest of this checkout reads what came out. A record gets it only where

    the version's source at the commit that is compiled has the hash that the record names,
    the compiler's packages that the record names are those that compiled now,
    what it says of resources is what was compiled, for its own sizes or others of its problem class: the first sweeps
    compiled each class once (of cuTile's: see `SETTLED`).

Any other stays without, and the script says why. `code` is added at the end of the record's line, and at the beginning
of its source `code_added`, the commit that was compiled; nothing else in the file changes. Needs no GPU.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mla_var3.record import Record
    from mla_var3.toolchain.digest import Code

ROOT = Path(__file__).resolve().parents[1]
OBJECTS = "objects.json"

#: Of a cuTile record's resources, what must be the same. Its compiler makes one of several machine codes of the same
#: Tile IR, which differ in their instructions.
SETTLED = ("registers", "threads", "spill_bytes", "stack_bytes")


# ---------------------------------------------------------------- with the package of the record's commit
def compile_inside(job: Mapping[str, Any], out: Path) -> None:
    """Compiles a version with the package that is on the path, and writes its code and what tells of its launch."""
    from mla_var3.problem import MlaProblem  # as the packages of these commits have it

    from mla_var3.catalogue import registry
    from mla_var3.device import Device

    kernel, device = registry.KernelId(**job["kernel"]), Device.get(job["device"])
    made: list[dict[str, Any]] = []
    _watch(kernel.language, job["launch"], made)
    found: dict[str, Any] = {"source": registry.source_hash(kernel), "calls": []}
    for point in job["points"]:
        made.clear()
        try:
            plan = registry.get_plan(kernel)(MlaProblem.from_record(point["problem"]), None, device)
            plan = plan.with_tiling(type(plan.tiling)(**point["tiling"]))
            compiled = plan.plan_empty().compile(None, device)
        except Exception as error:  # whatever an old package says; the others may still compile
            found["calls"].append({"error": f"{type(error).__name__}: {error}"})
            continue
        folder = out / str(len(found["calls"]))
        folder.mkdir()
        for index, one in enumerate(made):
            (folder / str(index)).write_bytes(one["code"])
        kept = [{name: value for name, value in one.items() if name != "code"} for one in made]
        found["calls"].append({"made": kept, "resources": compiled.to_record()})
    (out / OBJECTS).write_text(json.dumps(found, default=str), encoding="utf-8")


def _watch(language: str, launch: Sequence[str], made: list[dict[str, Any]]) -> None:
    """From now on every compilation of a language also leaves what it made in `made`."""
    if language == "cute-dsl":
        import cutlass.cute as cute

        from mla_var3.runtime.cute_kernel import CuteKernel

        compile_cute, compile_host = cute.compile, CuteKernel.compile
        hosts: dict[str, list[dict[str, Any]]] = {}

        def cute_watched(*args: Any, **options: Any) -> Any:
            compiled = compile_cute(*args, **options)
            made.append({"code": bytes(compiled.__cubin__), "ir": str(compiled.ir_module)})
            return compiled

        def host_watched(self: Any, *args: Any, **options: Any) -> Any:
            before = len(made)
            compiled = compile_host(self, *args, **options)
            # A name stands for one piece of code in a problem class and tiling, and is compiled for the first point.
            if len(made) > before:
                hosts[self.name] = made[before:]
            else:
                made.extend(hosts[self.name])
            return compiled

        cute.compile, CuteKernel.compile = cute_watched, host_watched
    elif language == "cutile-dsl":
        import cuda.tile.compilation as tile

        from mla_var3.runtime.ct_kernel import CtKernel
        from mla_var3.toolchain import cutile

        export, compile_one = tile.export_kernel, CtKernel.compile
        # Of this checkout: the commit's package has none.
        spec = importlib.util.spec_from_file_location("tile_ir", ROOT / "src/mla_var3/toolchain/tile_ir.py")
        assert spec is not None and spec.loader is not None
        ours = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(ours)
        known: dict[Any, tuple[Any, list[dict[str, Any]]]] = {}

        def tile_watched(kernel: Any, signatures: Any, file: Any, **options: Any) -> None:
            export(kernel, signatures, file, **options)
            if options["output_format"] == "cubin":
                ir, flags = ours.tile_ir(kernel, signatures[0], options["gpu_code"])
                made.append({"code": ir, "options": flags, "name": cutile.kernel_name(kernel)})

        def kernel_watched(self: Any, *args: Any, **options: Any) -> Any:
            # One compilation for all launches and points that share it.
            key = self.hinted(), self.signature_fn(self.tiling).with_mangled_symbol(self.name).symbol
            if key not in known:
                getattr(cutile, "_READ", {}).clear()
                before = len(made)
                known[key] = compile_one(self, *args, **options), made[before:]
            else:
                made.extend(known[key][1])
            return known[key][0]

        tile.export_kernel, CtKernel.compile = tile_watched, kernel_watched
    else:
        import triton

        compile_triton = triton.compile

        def triton_watched(*args: Any, **options: Any) -> Any:
            compiled = compile_triton(*args, **options)
            rule = {key: getattr(compiled.metadata, key, None) for key in launch}
            made.append({"code": bytes(compiled.asm["cubin"]), "launch": rule})
            return compiled

        triton.compile = triton_watched


# ---------------------------------------------------------------- with the package of this checkout
def code_of(language: str, device: str, folder: Path, made: Sequence[Mapping[str, Any]]) -> Code:
    """The code of what a process left in a folder."""
    from mla_var3.device import Device
    from mla_var3.toolchain import cutile, digest, triton_
    from mla_var3.toolchain.versions import toolchain

    hardware, found = Device.get(device), []
    for index, one in enumerate(made):
        binary = (folder / str(index)).read_bytes()
        if language == "cute-dsl":
            text, order = digest.host_function(one["ir"])
            found.append(digest.of_cubin(binary, hardware.arch, digest.hash_of(text), order, toolchain(language)))
        elif language == "cutile-dsl":
            found.append(cutile.code_of(one["name"], binary, one["options"], hardware))
        else:
            found.append(triton_.code_of(binary, one["launch"], hardware))
    whole = digest.Code.of_stages(found)
    assert whole is not None, "nothing was compiled"
    return whole


def other_packages(record: Record, installed: Mapping[str, str]) -> list[str]:
    """The compiler's packages that a record names in another version than is installed."""
    named = {**(record.environment.get("packages") or {}), **(record.environment.get("bundle_packages") or {})}
    mine = {name: version for name, version in named.items() if name in installed}
    if not mine:
        return ["it names none of its compiler's packages"]
    return [
        f"it names {name} {version}, and {installed[name]} is here"
        for name, version in mine.items()
        if version != installed[name]
    ]


def other_resources(record: Record, compiled: Mapping[str, Any]) -> list[str]:
    """What a record says of resources that the compiled call does not have."""
    if not record.resources:
        return ["it holds no resources to compare"]
    names = SETTLED if record.kernel.language == "cutile-dsl" else None
    return _differing(record.resources, compiled, names)


def _differing(said: Mapping[str, Any], compiled: Mapping[str, Any], names: Sequence[str] | None) -> list[str]:
    """Of a call, its kernels and its instruction counts; warnings are words, and may have changed since."""
    found = []
    for name in said if names is None else names:
        then, now = said.get(name), compiled.get(name)
        if name == "instructions":
            found += [f"{kind} {now.get(kind)}, recorded {n}" for kind, n in then.items() if now.get(kind) != n]
        elif name not in ("stages", "warnings") and now != then:
            found.append(f"{name} {now}, recorded {then}")
    stages, theirs = said.get("stages") or [], compiled.get("stages") or []
    if len(stages) != len(theirs):
        found.append(f"{len(theirs)} kernels, recorded {len(stages)}")
    for then, now in zip(stages, theirs, strict=False):
        found += [f"{then['name']}: {what}" for what in _differing(then, now, names)]
    return found


def with_code(line: str, code: Mapping[str, Any], commit: str) -> str:
    """A record's line with its code and the commit that was compiled. Raises `ValueError` where that is not all that
    would change."""
    added = json.dumps(code, separators=(",", ":"))
    changed = line.replace('"source":{', f'"source":{{"code_added":"{commit}",', 1)
    changed = changed.rstrip().removesuffix("}") + f',"code":{added}}}'
    before, after = json.loads(line), json.loads(changed)
    if "code" in before or after["source"].pop("code_added") != commit or after.pop("code") != code or after != before:
        raise ValueError(f"record {before.get('id')} cannot take a digest: {line[:80]}")
    return changed


def full_commit(name: str | None) -> str | None:
    """The first 12 digits of a commit that is here."""
    words = ["git", "-C", str(ROOT), "rev-parse", "--verify", "--quiet", f"{name}^{{commit}}"]
    done = subprocess.run(words, stdout=subprocess.PIPE, text=True, check=False)
    return done.stdout.strip()[:12] or None


def package_of(commit: str, folder: Path) -> Path:
    """The source folder of a commit, written out below `folder`."""
    out = folder / commit
    if not out.is_dir():
        out.mkdir()
        packed = subprocess.run(["git", "-C", str(ROOT), "archive", commit, "src"], stdout=subprocess.PIPE, check=True)
        subprocess.run(["tar", "x", "-C", str(out)], input=packed.stdout, check=True)
    return out / "src"


def compiled_at(commit: str, records: Sequence[Record], folder: Path) -> list[tuple[Code | None, list[str]]]:
    """(code, what speaks against it) for each of the records, of one version, device and commit: compiled in one
    process."""
    from mla_var3.toolchain.triton_ import LAUNCH

    first = records[0]
    job = {
        "kernel": first.kernel.model_dump(include={"language", "layer", "design", "version"}),
        "device": first.device,
        "launch": LAUNCH,
        "points": [{"problem": as_it_was(record.problem), "tiling": record.tiling} for record in records],
    }
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        # Caches of their own: what is taken from one is not compiled, and so not watched.
        caches = {"XDG_CACHE_HOME": f"{scratch}/cache", "TRITON_CACHE_DIR": f"{scratch}/triton"}
        path = os.pathsep.join([str(package_of(commit, folder)), *_extra()])
        words = [sys.executable, __file__, "--inside", json.dumps(job), scratch]
        environment = {**os.environ, **caches, "PYTHONPATH": path}
        done = subprocess.run(words, env=environment, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            last = (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
            return [(None, [f"its commit does not compile it: {last}"])] * len(records)
        found = json.loads((Path(scratch) / OBJECTS).read_text(encoding="utf-8"))
        calls = list(zip(records, found["calls"], strict=True))
        results: list[tuple[Code | None, list[str]]] = []
        for index, (record, call) in enumerate(calls):
            if "error" in call:
                results.append((None, [f"its commit does not compile it: {call['error']}"]))
                continue
            alike = [
                c["resources"]
                for r, c in zip(records, found["calls"], strict=True)
                if "made" in c and _alike(r, record)
            ]
            against = other_resources(record, call["resources"])
            if any(not other_resources(record, resources) for resources in alike):
                against = []
            if found["source"] != record.source.hash:
                against.append(f"its source was {record.source.hash}, and at the commit it is {found['source']}")
            results.append(
                (code_of(first.kernel.language, first.device, Path(scratch) / str(index), call["made"]), against)
            )
        return results


def as_it_was(problem: Mapping[str, Any]) -> dict[str, Any]:
    """A record's problem in the form of packages that knew one workload: a prefill had as many cached tokens as new."""
    fields = {name: value for name, value in problem.items() if name != "workload"}
    return {**fields, "t": fields["s"]} if problem.get("workload") == "prefill" else fields


def _alike(a: Record, b: Record) -> bool:
    """Whether both are of one problem class and tiling."""
    from mla_var3.workload import problem_from_record

    classes = [problem_from_record(record.problem).problem_class() for record in (a, b)]
    return classes[0] == classes[1] and a.tiling == b.tiling


def _extra() -> list[str]:
    """Folders of PYTHONPATH with other packages: the compiler that a record names may be there."""
    folders = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    return [folder for folder in folders if folder and not (Path(folder) / "mla_var3").is_dir()]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("kernels", nargs="*", metavar="KERNEL", help="only these versions")
    parser.add_argument("--at", metavar="COMMIT", help="compile this one, for records that lack code")
    parser.add_argument("--dry-run", action="store_true", help="compile nothing")
    parser.add_argument("--inside", nargs=2, help=argparse.SUPPRESS)  # a job as JSON, and the folder to write to
    args = parser.parse_args()
    if args.inside:
        compile_inside(json.loads(args.inside[0]), Path(args.inside[1]))
        return 0
    return add_digests(args.kernels, args.at, args.dry_run)


def add_digests(only: Sequence[str], at: str | None, dry_run: bool) -> int:
    """Goes through the record files; prints a line for each record that was compiled, and what came of all."""
    from mla_var3 import paths
    from mla_var3.catalogue import registry
    from mla_var3.record import Record
    from mla_var3.toolchain.versions import GENERATES, toolchain
    from mla_var3.workload import problem_from_record

    here = {kernel.label for kernel in registry.all_kernels() if kernel.language in GENERATES}
    counts: Counter[str] = Counter()
    groups: dict[str, list[tuple[Path, Record]]] = {}  # what one process compiles
    for file in sorted(paths.shipped_results_dir().rglob("*.jsonl")):
        for line in file.read_text(encoding="utf-8").split("\n"):
            if not line or ('"code":' in line and '"code_added":' not in line):
                continue
            record = Record.model_validate_json(line)
            label, language = record.kernel.label, record.kernel.language
            if label not in here or record.status != "passed" or (only and label not in only):
                continue
            commit = full_commit(at if at and record.code is None else record.source.code_added or record.source.commit)
            against = other_packages(record, toolchain(language))
            if commit is None:
                against.insert(0, f"commit {at or record.source.commit} is not here")
            if against or commit is None:
                if record.code is not None:
                    continue
                counts[f"{label}: left without: {'; '.join(against)}"] += 1
                continue
            # CuTe code is made for a problem class, and in a process that has compiled another before, the compiler
            # was seen to choose other registers.
            alone = [problem_from_record(record.problem).problem_class().key(), record.tiling]
            key = [commit, label, record.device, *(alone if language == "cute-dsl" else [])]
            groups.setdefault(json.dumps(key), []).append((file, record))
    with tempfile.TemporaryDirectory(prefix="past-records-") as scratch:
        for key, members in groups.items():
            commit = json.loads(key)[0]
            missing = sum(record.code is None for _, record in members)
            if missing and dry_run:
                counts[f"{members[0][1].kernel.label}: to compile at {commit}"] += missing
            if not missing or dry_run:
                continue
            results = compiled_at(commit, [record for _, record in members], Path(scratch))
            for (file, record), (code, against) in zip(members, results, strict=True):
                label = record.kernel.label
                if record.code is not None:  # stands beside those that lack theirs, and is compared
                    if code is None or code.digest != record.code["digest"]:
                        raise SystemExit(f"{record.id} holds {record.code['digest']}, and {commit} compiles to another")
                    continue
                if code is None or against:
                    counts[f"{label}: left without, compiled at {commit}"] += 1
                    print(f"{record.id} {label} {record.problem_label}: {'; '.join(against)}", flush=True)
                    continue
                write_code(file, record.id, code.to_record(), commit)
                counts[f"{label}: added, compiled at {commit}"] += 1
                print(f"{record.id} {label} {record.problem_label}: {code.digest} from {commit}", flush=True)
    print("\n".join(f"{what}: {count}" for what, count in sorted(counts.items())))
    return 0


def write_code(file: Path, record: str, code: Mapping[str, Any], commit: str) -> None:
    """Puts a record's code into its line of a file, by way of another file, so that a kill leaves one of the two."""
    lines = file.read_text(encoding="utf-8").split("\n")
    lines = [with_code(line, code, commit) if f'"id":"{record}"' in line else line for line in lines]
    beside = file.with_suffix(".tmp")
    beside.write_text("\n".join(lines), encoding="utf-8")
    beside.replace(file)


if __name__ == "__main__":
    raise SystemExit(main())
