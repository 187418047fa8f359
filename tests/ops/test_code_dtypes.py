"""What a packed cache may be passed as: e4m3fn codes are read, every other 8-bit dtype is refused by name."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from odd_layouts import CALLS  # noqa: E402
from ops_fakes import CpuEngine  # noqa: E402

from mla_var3.errors import UserError  # noqa: E402
from mla_var3.ops import flash_mla, sparse_mla_decode  # noqa: E402
from mla_var3.packed_cache import LAYOUTS, new_cache  # noqa: E402

PACKED = [call for call, (_, made, *_) in CALLS.items() if "layout" in made]
REFUSED = [
    name
    for name in ("float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu", "bool", "int8")
    if hasattr(torch, name)
]


def refused(name: str, layout: str) -> bool:
    """int8 is FlashMLA's name for bytes, which codes beside scales are; alone they would be numbers."""
    return name != "int8" or layout in ("flat", "flat_no_rope")


def called(call: str, dtype: Any) -> Any:
    function, made, _, design = CALLS[call]
    given = {name: x.clone() if isinstance(x, torch.Tensor) else x for name, x in made.items()}
    cache = new_cache(LAYOUTS[made["layout"]], *made["kv_cache"].shape[:2]).copy_(made["kv_cache"])
    given["kv_cache"] = cache.view(dtype)
    found = function(**given, kernel=f"torch/{design}", on=CpuEngine())
    return cache if found is None else found


@pytest.mark.parametrize("call", PACKED)
def test_every_function_refuses_other_codes(call: str) -> None:
    assert {"rope_v32", "rope_flat", "packed_v4", "sparse_flat"} <= set(PACKED)
    layout, wanted = CALLS[call][1]["layout"], called(call, torch.uint8)
    assert torch.equal(called(call, torch.float8_e4m3fn), wanted)
    for name in REFUSED:
        if not refused(name, layout):
            assert torch.equal(called(call, getattr(torch, name)), wanted)
            continue
        with pytest.raises(
            UserError, match=rf"^kv_cache is torch.{name}: a cache of layout {layout} holds e4m3fn codes"
        ):
            called(call, getattr(torch, name))


@pytest.mark.parametrize("name", [name for name in REFUSED if refused(name, "v32")])
def test_flash_mla_s_arguments_are_named(name: str) -> None:
    made = CALLS["sparse_v32"][1]
    right, wrong = made["kv_cache"].unsqueeze(2), made["kv_cache"].unsqueeze(2).view(getattr(torch, name))
    meta, _ = flash_mla.get_mla_metadata()
    options = {"is_fp8_kvcache": True, "indices": made["indices"]}
    for argument, cache, more in (
        ("k_cache", wrong, {}),
        ("extra_k_cache", right, {"extra_k_cache": wrong, "extra_indices_in_kvcache": made["indices"]}),
    ):
        with pytest.raises(UserError, match=rf"^{argument} is torch.{name}: "):
            flash_mla.flash_mla_with_kvcache(made["q"], cache, None, None, 512, meta, **options, **more)
    options = {"extra_cache": wrong, "extra_indices": made["indices"]}
    with pytest.raises(UserError, match=rf"^extra_cache is torch.{name}: "):
        sparse_mla_decode(made["q"], right, made["indices"], **options, on=CpuEngine())
