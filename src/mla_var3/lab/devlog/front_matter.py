"""The block of `name: value` between two lines --- at the top of an entry or a page."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from mla_var3.lab.devlog.segments import Finding

_BLOCK = re.compile(r"---\n(.*?)^---[ \t]*$", re.DOTALL | re.MULTILINE)


def read_fields(text: str) -> tuple[dict[str, Any], list[Finding]]:
    """The fields, and what kept them from being read."""
    import yaml

    match = _BLOCK.match(text)
    if match is None:
        return {}, [Finding(1, "it has no front matter: begin with a block of `name: value` between two lines ---")]
    try:
        # Plain strings throughout: YAML would read the record id 123e45 as a number and a date as an object.
        loaded = yaml.load(match[1], Loader=yaml.BaseLoader)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = 2 + (mark.line if mark else 0)
        return {}, [Finding(line, f"its front matter is not YAML: {getattr(error, 'problem', error)}")]
    return dict(loaded) if isinstance(loaded, Mapping) else {}, []


def body_line(text: str) -> int:
    """The line on which what follows the block begins; 1 without a block."""
    match = _BLOCK.match(text)
    return text[: match.end()].count("\n") + 2 if match else 1
