"""What a public function refuses is told in the names of its own arguments, and never as an error of the inside."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from ops_fakes import CpuEngine  # noqa: E402

from mla_var3 import ops, packed_cache  # noqa: E402
from mla_var3.errors import UserError  # noqa: E402
from mla_var3.ops import context_parallel, flash_mla, layer, request, sparse  # noqa: E402
from mla_var3.workload.decode import MlaProblem  # noqa: E402
from mla_var3.workload.gemm import GemmProblem  # noqa: E402
from mla_var3.workload.merge import MergeProblem  # noqa: E402
from mla_var3.workload.norm import NormProblem  # noqa: E402
from mla_var3.workload.packed_append import PackedAppendProblem  # noqa: E402
from mla_var3.workload.rope import RopeProblem  # noqa: E402
from mla_var3.workload.sparse_decode import SparseProblem  # noqa: E402

V32 = packed_cache.layout_of("v32")


def half(*shape: int) -> Any:
    return torch.zeros(shape, dtype=torch.bfloat16)


def whole(*shape: int, dtype: Any = torch.int32) -> Any:
    return torch.zeros(shape, dtype=dtype)


def single(*shape: int) -> Any:
    return torch.zeros(shape)


def codes(*shape: int) -> Any:
    return torch.zeros(shape, dtype=torch.uint8)


#: Arguments that each function takes, by its name.
GIVEN: dict[str, dict[str, Any]] = {
    "mla_decode": {
        "q": half(2, 1, 16, 576), "kv_cache": half(4, 64, 576), "page_table": whole(2, 2), "seq_lens": whole(2),
        "kernel": "torch/flash_mla",
    },
    "sparse_mla_decode": {
        "q": half(2, 1, 16, 576), "kv_cache": codes(4, 64, 656), "indices": whole(2, 1, 8),
        "kernel": "torch/sparse_mla",
    },
    "packed_mla_decode": {
        "q": half(2, 1, 16, 576), "kv_cache": codes(4, 64, 656), "page_table": whole(2, 2), "seq_lens": whole(2),
        "kernel": "torch/sparse_mla",
    },
    "rmsnorm": {"x": half(4, 256), "weight": half(256), "kernel": "torch/rmsnorm"},
    "rope_append": {
        "q": half(2, 4, 192), "latent": half(2, 512), "rope": half(2, 64), "positions": whole(2), "slots": whole(2),
        "table": single(8, 64), "out": half(2, 4, 576), "kv_cache": half(4, 64, 576), "kernel": "torch/rope_append",
    },
    "latent_append": {
        "latent": half(2, 512), "slots": whole(2), "kv_cache": codes(4, 64, 528), "layout": "v32_no_rope",
        "kernel": "torch/packed_append",
    },
    "absorb_gemm": {
        "x": half(2, 4, 128), "weight": half(4 * 256, 512), "side": "q", "kernel": "torch/absorb_gemm",
    },
    "merge_partials": {"partials": half(3, 4, 512), "lse": single(3, 4), "kernel": "torch/merge_partials"},
}  # fmt: skip
PACKED_APPEND = {
    **GIVEN["rope_append"],
    "layout": "v32",
    "kv_cache": codes(4, 64, 656),
    "kernel": "torch/packed_append",
}


def refused(function: Callable[..., Any], **arguments: Any) -> str:
    """The sentence of a `UserError`, whose first word is an argument, or holds one."""
    with pytest.raises(UserError) as found:
        function(**arguments)
    said = str(found.value)
    assert "problem." not in said and "problem has" not in said, said
    named = set(re.findall(r"\w+", said)) & set(inspect.signature(function).parameters)
    assert named, f"names no argument: {said}"
    return said


# ---------------------------------------------------------------- by hand
@pytest.mark.parametrize("name", GIVEN)
def test_what_is_changed_below_is_taken_as_it_stands(name: str) -> None:
    getattr(ops, name)(**GIVEN[name], on=CpuEngine())


@pytest.mark.parametrize(
    ("name", "changes", "sentence"),
    [
        ("mla_decode", {"q": half(2, 0, 16, 576)}, r"^q \(b, s, h, k \+ p\): s = 0 is too small: use at least 1\.$"),
        ("mla_decode", {"q": half(2, 1, 0, 576)}, r"^q \(b, s, h, k \+ p\): h = 0 is too small"),
        ("mla_decode", {"kv_cache": half(4, 0, 576)}, r"^kv_cache \(pages, page, h_kv, k \+ p\): page = 0 is too"),
        ("packed_mla_decode", {"q": half(2, 0, 16, 576)}, r"^q \(b, s, h, columns\): s = 0 is too small"),
        ("packed_mla_decode", {"q": half(2, 1, 0, 576)}, r"^q \(b, s, h, columns\): h = 0 is too small"),
        ("packed_mla_decode", {"kv_cache": codes(4, 0, 656)}, r"^(page_table and )?kv_cache.* page = 0 is too"),
        ("sparse_mla_decode", {"q": half(2, 0, 16, 576), "indices": whole(2, 0, 8)}, r"^q \(b, s, h, columns\): s = 0"),
        ("sparse_mla_decode", {"q": half(2, 1, 0, 576)}, r"^q \(b, s, h, columns\): h = 0 is too small"),
        ("sparse_mla_decode", {"kv_cache": codes(4, 0, 656)}, r"^kv_cache \(pages, page, \.\.\.\): page = 0 is"),
        (
            "sparse_mla_decode",
            {"kv_cache": codes(1, 64, 656).expand(4, 64, 656)},
            r"^kv_cache has pages of 41984 bytes that begin 0 bytes apart: they must not overlap",
        ),
        ("rmsnorm", {"eps": 0.0}, r"^eps = 0\.0 is no positive number: use for example 1e-6\.$"),
        ("rmsnorm", {"eps": -1e-6}, r"^eps = -1e-06 is no positive number"),
        ("rmsnorm", {"eps": float("nan")}, r"^eps = nan is no positive number"),
        ("rmsnorm", {"eps": "small"}, r"^eps is a str: pass a positive number"),
        ("rmsnorm", {"eps": None}, r"^eps is a NoneType: pass a positive number"),
        ("rmsnorm", {"x": half(4, 0), "weight": half(0)}, r"^weight \(width,\): width = 0 is too small"),
        (
            "rmsnorm",
            {"second_weight": half(257)},
            r"^second_weight has 257 elements and x 256 columns: x is \(n, width \+ w\), with columns",
        ),
        ("rmsnorm", {"second_weight": half(256)}, r"^second_weight has 256 elements and x 256 columns"),
        ("rmsnorm", {"second_weight": [1.0]}, r"^second_weight is a list: pass a torch tensor"),
        (
            "rmsnorm",
            {"x": half(4, 320), "second_weight": half(64), "residual": half(4, 256)},
            r"^second_weight and residual are not taken together: leave one out\.$",
        ),
        ("rmsnorm", {"x": single(4, 256), "weight": single(256)}, r"^x is torch\.float32: the kernels compute in"),
        ("absorb_gemm", {"x": half(2, 0, 128)}, r"^x is \(2, 0, 128\), \(n, h, columns\): give it at least one"),
        ("absorb_gemm", {"x": half(0, 0, 128)}, r"^x is \(0, 0, 128\), \(n, h, columns\): give it at least one"),
        ("absorb_gemm", {"weight": half(0, 512), "x": half(2, 4, 0)}, r"^weight \(h · 2d, k\): d = 0 is too small"),
        ("absorb_gemm", {"weight": half(4 * 256, 0)}, r"^weight \(h · 2d, k\): k = 0 is too small"),
        ("absorb_gemm", {"x": single(2, 4, 128), "weight": single(4 * 256, 512)}, r"^x is torch\.float32"),
        ("rope_append", {"q": half(2, 0, 192), "out": half(2, 0, 576)}, r"^q \(n, h, any\): h = 0 is too small"),
        ("rope_append", {"kv_cache": half(4, 0, 576)}, r"^kv_cache \(pages, page, k \+ p\): page = 0 is too small"),
        (
            "rope_append",
            {"rope": half(2, 63), "table": single(8, 63), "out": half(2, 4, 575), "kv_cache": half(4, 64, 575)},
            r"^rope \(n, p\): p = 63 is odd: columns turn in pairs\.$",
        ),
        ("rope_append", {"q": half(2, 4, 32)}, r"^q \(n, h, any\): columns = 32 is too small: use at least 64\.$"),
        ("rope_append", {"table": single(0, 64)}, r"^table \(positions, p\): positions = 0 is too small"),
        ("rope_append", {"positions": [0, 1]}, r"^positions is a list: pass a torch tensor"),
        ("rope_append", {"positions": single(2), "slots": single(2)}, r"^positions are torch\.float32: pass"),
        (
            "rope_append",
            {
                "q": single(2, 4, 192), "latent": single(2, 512), "rope": single(2, 64), "kv_cache": single(4, 64, 576),
                "out": single(2, 4, 576),
            },
            r"^q is torch\.float32",
        ),
        (
            "latent_append",
            {"kv_cache": codes(4, 0, 528)},
            r"^kv_cache \(pages, page, bytes of a token\): page = 0 is too small",
        ),
        ("latent_append", {"latent": half(2, 576)}, r"^latent has 576 columns: tokens of layout v32_no_rope have 512"),
        ("latent_append", {"latent": single(2, 512)}, r"^latent is torch\.float32"),
        ("latent_append", {"latent": half(2, 512).half()}, r"^latent: dtype = 'fp16' is not taken"),
        ("latent_append", {"slots": single(2)}, r"^slots are torch\.float32: pass torch\.int64 or torch\.int32"),
        ("latent_append", {"slots": whole(3)}, r"^slots is \(3,\)"),
        ("latent_append", {"layout": "v32"}, r"^layout v32 has rope columns: rope_append turns them"),
        ("latent_append", {"layout": "v33_no_rope"}, r"^cache layout 'v33_no_rope' is unknown"),
        ("latent_append", {"layout": "flat_no_rope"}, r"^layout flat_no_rope needs cache_scale"),
        ("latent_append", {"cache_scale": single(1)}, r"^layout v32_no_rope has no cache_scale, which is of flat_no"),
        ("latent_append", {"kv_cache": codes(4, 64, 512)}, r"^kv_cache: a cache of layout v32_no_rope is"),
        ("latent_append", {"kv_cache": half(4, 64, 528)}, r"^kv_cache is torch\.bfloat16: a cache of layout"),
        ("merge_partials", {"partials": half(0, 4, 512), "lse": single(0, 4)}, r"^partials \(n, \.\.\., k\): n = 0"),
        ("merge_partials", {"partials": half(3, 4, 0)}, r"^partials \(n, \.\.\., k\): k = 0 is too small"),
        ("merge_partials", {"partials": [1.0]}, r"^partials is a list: pass a torch tensor"),
        ("merge_partials", {"partials": single(3, 4, 512)}, r"^partials is torch\.float32"),
    ],
)  # fmt: skip
def test_a_size_that_makes_no_sense_names_its_argument(name: str, changes: dict[str, Any], sentence: str) -> None:
    said = refused(getattr(ops, name), **{**GIVEN[name], **changes, "on": CpuEngine()})
    assert re.search(sentence, said), said


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"kv_cache": codes(4, 0, 656)}, r"^kv_cache \(pages, page, bytes of a token\): page = 0 is too small"),
        ({"q": half(2, 0, 192), "out": half(2, 0, 576)}, r"^q \(n, h, any\): h = 0 is too small"),
        ({"layout": "bf16", "kv_cache": codes(4, 64, 576)}, r"^layout = 'bf16'|layout bf16"),
        ({"layout": "flat", "cache_scale": None}, r"^layout flat needs cache_scale"),
        ({"layout": "flat_no_rope"}, r"^layout flat_no_rope has no rope columns: latent_append writes such a cache\.$"),
    ],
)
def test_appending_to_a_packed_cache_names_its_arguments(changes: dict[str, Any], sentence: str) -> None:
    ops.rope_append(**PACKED_APPEND, on=CpuEngine())
    said = refused(ops.rope_append, **{**PACKED_APPEND, **changes, "on": CpuEngine()})
    assert re.search(sentence, said), said


@pytest.mark.parametrize("name", GIVEN)
def test_what_is_no_tensor_is_named(name: str) -> None:
    tensors = [x for x, value in GIVEN[name].items() if isinstance(value, torch.Tensor)]
    for argument in tensors:
        for wrong in (None, [1, 2], 3.0):
            if argument == "out" and wrong is None:
                continue  # out is made then
            said = refused(getattr(ops, name), **{**GIVEN[name], argument: wrong, "on": CpuEngine()})
            assert said.startswith(f"{argument} is a {type(wrong).__name__}: pass a torch tensor"), said


# ---------------------------------------------------------------- of the whole family
#: What makes a function's problem, and fields of it that the function sets or judges itself.
FACTORIES: list[tuple[Any, type[Any], str]] = [
    (request._problem, MlaProblem, "causal strided tree dtype scale total"),
    (layer._norm, NormProblem, "residual dtype"),
    (layer._rope, RopeProblem, "interleaved index dtype"),
    (layer._append, PackedAppendProblem, "interleaved index"),
    (layer._latents, PackedAppendProblem, "index"),
    (layer._gemm, GemmProblem, "side dtype"),
    (sparse._sparse, SparseProblem, "layout lengths sink extra_lengths scale extra_layout"),
    (sparse._dense, SparseProblem, "layout sink scale"),
    (context_parallel._merge, MergeProblem, "dtype"),
]


@pytest.mark.parametrize(("factory", "kind", "judged_before"), FACTORIES, ids=lambda x: getattr(x, "__name__", ""))
def test_every_number_of_a_problem_has_the_name_of_an_argument(
    factory: Any, kind: type[Any], judged_before: str
) -> None:
    arguments = factory.__wrapped__.arguments
    given = set(inspect.signature(factory).parameters)
    if "fields" in given:  # all of the problem's, in order
        given = {field.name for field in dataclasses.fields(kind)}
    wanted = {"tokens" if kind is MergeProblem and name == "rows" else name for name in given}
    assert wanted - set(judged_before.split()) <= set(arguments)
    assert not any("problem" in argument for argument in arguments.values())


def test_no_function_speaks_of_a_problem() -> None:
    """In sentences of the rooms that serve; those of `workload` are translated, as above."""
    package = Path(ops.__file__).parents[1]
    for file in (*(package / "ops").glob("*.py"), *(package / "layers").glob("*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Raise) and node.exc is not None:
                words = [
                    x.value for x in ast.walk(node.exc) if isinstance(x, ast.Constant) and isinstance(x.value, str)
                ]
                assert not re.search(r"\bproblem\.\w", " ".join(words)), f"{file.name}:{node.lineno}: {words}"


# ---------------------------------------------------------------- FlashMLA's names
META = {"tile_scheduler_metadata": flash_mla.FlashMLASchedMeta(), "head_dim_v": 512}
DENSE = {
    "q": half(2, 1, 16, 576), "k_cache": half(4, 64, 1, 576), "block_table": whole(2, 2), "cache_seqlens": whole(2),
    **META,
}  # fmt: skip
SPARSE = {
    **DENSE, "block_table": None, "cache_seqlens": None, "k_cache": codes(4, 64, 1, 656), "is_fp8_kvcache": True,
    "indices": whole(2, 1, 8),
}  # fmt: skip


@pytest.mark.parametrize(
    ("given", "changes", "begins"),
    [
        (DENSE, {"q": half(2, 1, 0, 576)}, "q (b, s, h, k + p): h = 0"),
        (DENSE, {"k_cache": half(4, 0, 1, 576)}, "k_cache (pages, page, h_kv, k + p): page = 0"),
        (DENSE, {"k_cache": half(4, 64, 1, 512)}, "k_cache has 512 columns and q 576"),
        (DENSE, {"k_cache": codes(4, 64, 1, 576)}, "k_cache is torch.uint8: flash_mla_with_kvcache takes"),
        (DENSE, {"block_table": whole(3, 2)}, "block_table has 3 rows and cache_seqlens 2 entries"),
        (DENSE, {"block_table": single(2, 2)}, "block_table is torch.float32: pass it as torch.int32"),
        (DENSE, {"cache_seqlens": [1, 2]}, "cache_seqlens is a list"),
        (DENSE, {"softmax_scale": "1"}, "softmax_scale is of type str"),
        (DENSE, {}, "q is on cpu: flash_mla_with_kvcache runs on an NVIDIA GPU"),
        (SPARSE, {"attn_sink": single(3)}, "attn_sink is (3,)"),
        (SPARSE, {"topk_length": whole(3)}, "topk_length is (3,)"),
        (SPARSE, {"extra_topk_length": whole(2)}, "extra_topk_length was given without extra_k_cache"),
        (SPARSE, {"extra_k_cache": codes(4, 64, 1, 656)}, "extra_k_cache was given without extra_indices_in_kvcache"),
        (SPARSE, {"k_cache": codes(4, 64, 1, 655)}, "k_cache: a cache of layout v32 is"),
        (SPARSE, {"indices": whole(3, 1, 8)}, "indices is (3, 1, 8)"),
        (SPARSE, {}, "q is on cpu: flash_mla_with_kvcache runs on an NVIDIA GPU"),
        (SPARSE, {"k_cache": "cache"}, "k_cache is a str: pass a torch tensor"),
        (SPARSE, {"indices": [0]}, "indices is a list: pass a torch tensor"),
    ],
)
def test_flash_mla_names_its_own_arguments(given: dict[str, Any], changes: dict[str, Any], begins: str) -> None:
    said = refused(flash_mla.flash_mla_with_kvcache, **{**given, **changes})
    assert said.startswith(begins), said
    ours = {"kv_cache", "page_table", "seq_lens", "topk_lens", "extra_cache", "extra_indices", "extra_topk_lens"}
    assert not ours & set(re.findall(r"\w+", said))


# ---------------------------------------------------------------- of caches
@pytest.mark.parametrize("name", packed_cache.LAYOUTS)
@pytest.mark.parametrize("shape", [(3, 0), (0, 64), (0, 0)])
def test_no_tokens_pack_to_a_cache_without_tokens(name: str, shape: tuple[int, int]) -> None:
    layout = packed_cache.layout_of(name)
    values = torch.randn(*shape, layout.columns)
    scale = packed_cache.flat_scale(values) if layout.one_scale else None
    cache = packed_cache.pack(layout, values, scale=scale)
    assert cache.shape[:2] == shape and packed_cache.unpack(layout, cache, scale).shape == values.shape
    assert packed_cache.flat_scale(values).item() == pytest.approx(packed_cache.SCALE_MIN)


def test_values_of_another_form_are_named() -> None:
    with pytest.raises(UserError, match=r"^values are \(4, 576\): pass \(pages, tokens of a page, columns\)"):
        packed_cache.pack(V32, torch.zeros(4, 576))
