"""What a serving engine calls: the fastest version for its shapes, as one function.

    from mla_var3.ops import mla_decode
    out = mla_decode(q, kv_cache, page_table, seq_lens, causal=True)

`mla_var3.ops.flash_mla` has the same under FlashMLA's names. docs/serving.md says how to use both.
"""

from __future__ import annotations

from mla_var3.ops.decode import compile_for, mla_decode
from mla_var3.ops.engine import DecodeSchedule
from mla_var3.ops.library import register_with_torch

__all__ = ["DecodeSchedule", "compile_for", "mla_decode"]

register_with_torch()
