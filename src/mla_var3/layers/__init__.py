"""Layers of a model, built from its config and loading its checkpoint; inference only.

    from mla_var3.layers import LatentCache, MlaAttention

torch is imported when one of the names is first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mla_var3.layers.attention import MlaAttention
    from mla_var3.layers.cache import LatentCache, Step

__all__ = ["LatentCache", "MlaAttention", "Step"]


def __getattr__(name: str) -> Any:
    if name == "MlaAttention":
        from mla_var3.layers.attention import MlaAttention

        return MlaAttention
    if name in ("LatentCache", "Step"):
        from mla_var3.layers import cache

        return getattr(cache, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
