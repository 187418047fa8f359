"""Files and kernels that pages and configs name: each must exist here, or a reader follows it into nothing.

A path counts if it begins with a folder of the project, a kernel if it is written `language/design[_vN]`; both may be
patterns with * and ?. Three kinds of names are let through although nothing here has them:

- placeholders, as in `conf/experiment/NAME.yaml` or `devlogs/<design>/`;
- what the page itself makes: a file that it shows in full (the path in backquotes and a colon, then a block of code),
  with the kernel that this is, and the next version of a design that it clones (`mla-var3 clone triton/rmsnorm`);
- a retired version's files in its own entry, where the entry's commit has them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator
from fnmatch import fnmatchcase
from pathlib import Path

from mla_var3.catalogue import registry
from mla_var3.catalogue.registry import LANGUAGES, PEER
from mla_var3.catalogue.retired import retired
from mla_var3.errors import nearest
from mla_var3.lab.clone import target_version
from mla_var3.lab.devlog.segments import Finding
from mla_var3.names import kernel_label

_BELOW = r"/[\w./*?<>{}-]*[\w*/>}]"
# `tests/` and `examples/` are folders of other people's projects as well, which pages quote in blocks of code.
_PATH = re.compile(rf"(?<![\w./$-])(?:src|scripts|conf|docs|devlogs){_BELOW}")
_ANY_PATH = re.compile(rf"(?<![\w./$-])(?:src|scripts|conf|docs|devlogs|tests|examples|results){_BELOW}")
_LABEL = re.compile(rf"(?<![\w./-])(?:{'|'.join(LANGUAGES)})/[a-z*?][a-z0-9_*?]*(?![\w/-])")
_CODE = re.compile(r"`([^`\n]+)`")
_PLACEHOLDER = re.compile(r"[<{]|(?<![A-Za-z])(?!README|CHANGELOG|CONTRIBUTING)[A-Z]{4,}")
_SHOWN = re.compile(r"^`([^`\n]+)`:\n\n```\w+\n(.*?)^```", re.MULTILINE | re.DOTALL)
_CLONED = re.compile(r"\bmla-var3 clone ([\w/-]+)")
_VERSION = re.compile(r"src/mla_var3/kernel/(\w+)/\w+/\w+/(\w+)/\2\.py")


def labels_of(root: Path) -> set[str]:
    """Kernels that may be named: those that are here, the retired ones, and all that have an entry below the root."""
    here = {kernel.label for kernel in registry.all_kernels()} | set(retired())
    entries = (
        re.fullmatch(r"(.+)/(.+)-v(\d+)", str(path.relative_to(root / "devlogs").with_suffix("")))
        for path in (root / "devlogs").glob("*/*-v*.md")
    )
    return here | {kernel_label(m[2], m[1], int(m[3])) for m in entries if m is not None}


def check(
    text: str, root: Path, labels: Collection[str], held: Callable[[str], bool | None] | None = None
) -> Iterator[Finding]:
    """What a page or a config names that does not exist. held: whether the commit of a retired version has a path; None
    where that cannot be asked, and the path is let through."""
    made, kernels = _made(text, root)
    for number, line in enumerate(text.split("\n"), start=1):
        for path in dict.fromkeys([*_PATH.findall(line), *_ANY_PATH.findall(" ".join(_CODE.findall(line)))]):
            if _PLACEHOLDER.search(path) or path in made or _here(root, path):
                continue
            if held is None:
                yield Finding(number, f"{path} does not exist")
            elif held(path) is False:
                yield Finding(number, f"{path} does not exist, neither here nor at the commit of `code`")
        for label in dict.fromkeys(_LABEL.findall(line)):
            if not any(fnmatchcase(known, label) for known in (*kernels, *labels)):
                yield Finding(number, f"kernel {label} does not exist: {nearest(label, labels)}")


def _here(root: Path, path: str) -> bool:
    return any(root.glob(path)) if set("*?") & set(path) else (root / path).exists()


def _made(text: str, root: Path) -> tuple[set[str], set[str]]:
    """Paths and labels of what a page makes."""
    files = dict(_SHOWN.findall(text))
    languages = {known.folder: name for name, known in LANGUAGES.items()}
    kernels = {f"{languages.get(m[1])}/{m[2]}" for path in files if (m := _VERSION.fullmatch(path))}
    for code in files.values():
        kernels |= {f"{PEER}/{peer}" for peer in re.findall(r'^    peer = "(\w+)"$', code, re.MULTILINE)}
    made = set(files)
    here = {kernel.label: kernel for kernel in registry.all_kernels()}
    for source in (here[label] for label in _CLONED.findall(text) if label in here):
        clone = target_version(source, None)
        kernels.add(clone.label)
        if clone.path.is_relative_to(root):
            made.add(clone.path.relative_to(root).as_posix())
    return made, kernels
