"""`MlaAttention` on a GPU: decode by our kernels, against transformers' module of the same weights; and in graphs."""

from __future__ import annotations

import copy
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers", reason="transformers is in the extra `layers`: make test installs it")

import layer_cases as cases  # noqa: E402

from mla_var3.errors import UserError  # noqa: E402
from mla_var3.layers import LatentCache, MlaAttention  # noqa: E402

pytestmark = pytest.mark.gpu


def real(h: int, **changes: Any) -> Any:
    """A layer with the widths of DeepSeek V3, but for the hidden state and the heads."""
    sizes = {"hidden_size": 2048, "q_lora_rank": 1536, "num_attention_heads": h, "num_key_value_heads": h}
    yarn = cases.YARN | {"original_max_position_embeddings": 4096}
    return cases.v3(**cases.REAL | sizes | {"max_position_embeddings": 163840, "rope_parameters": yarn} | changes)


CONFIGS = {
    "h16": real(16),
    "h128": real(128),
    "h16 halves": real(16, rope_interleave=False, q_lora_rank=None),
}
PROMPTS, STEPS = [700, 64, 1, 1029], 32
#: (config, requests, most tokens of one) of the decode steps here, which make_gpu_bundle.py compiles ahead.
DECODED = [(config, len(PROMPTS), max(PROMPTS) + STEPS) for config in CONFIGS.values()]
DECODED += [(real(16), requests, tokens) for requests, tokens in ((3, 512), (1, 128), (1, 64))]


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_errors_in_bf16_are_no_larger_than_those_of_transformers(config: Any) -> None:
    cases.assert_rounded_as_often(cases.rounding_errors(config, PROMPTS, STEPS, "cuda"))


def test_decode_in_float32_is_refused() -> None:
    """What `mla_decode` says reaches the user: nothing slow takes its place."""
    layer = MlaAttention(real(16), device="cuda")
    cache = LatentCache(1, 1, 64, columns=layer.columns, device="cuda")
    with pytest.raises(UserError, match=r"torch.float32: the kernels compute in torch.bfloat16 and torch.float16"):
        layer(torch.zeros(1, 2048, device="cuda"), cache.pages[0], cache.extend({cache.join(): 1}))


def test_a_captured_step_follows_lengths_pages_and_slots() -> None:
    """Thirty steps as replays of the first one's graph, into whose tensors each step's are copied, give the bits of as
    many calls; requests grow over the ends of pages, and unused rows of the cache hold NaN."""
    layer = MlaAttention(real(16), dtype=torch.bfloat16, device="cuda")
    for weight in layer.parameters():
        if weight.dim() > 1:
            torch.nn.init.normal_(weight, std=weight.shape[-1] ** -0.5)
        else:
            torch.nn.init.ones_(weight)
    outputs, caches = [], []
    for captured in (False, True):
        torch.manual_seed(0)
        cache = LatentCache(1, 24, 512, columns=layer.columns, dtype=torch.bfloat16, device="cuda")
        cache.pages.fill_(float("nan"))
        requests = [cache.join() for _ in range(3)]
        prompts = cache.extend(dict(zip(requests, (50, 127, 1), strict=True)))
        layer(torch.randn(178, 2048, device="cuda").bfloat16(), cache.pages[0], prompts)
        found, graph, kept, hidden, out = [], torch.cuda.CUDAGraph(), None, None, None
        for _ in range(30):
            x = torch.randn(3, 2048, device="cuda").bfloat16()
            step = cache.extend(dict.fromkeys(requests, 1))
            if not captured:
                found.append(layer(x, cache.pages[0], step))
                continue
            if kept is None:
                kept, hidden = step, x
                layer(hidden, cache.pages[0], kept)  # compiles, and joins weights
                with torch.cuda.graph(graph):
                    out = layer(hidden, cache.pages[0], kept)
            hidden.copy_(x)
            for name in ("page_table", "seq_lens", "positions", "slots"):
                getattr(kept, name).copy_(getattr(step, name))
            graph.replay()
            found.append(out.clone())
        outputs.append(torch.stack(found))
        caches.append(cache.pages.nan_to_num(7.0))
    assert bool(outputs[0].isfinite().all())
    assert torch.equal(*outputs) and torch.equal(*caches)


@pytest.mark.parametrize("name", ["h16", "h16 halves"])
def test_prompts_and_chunks_beside_decodes(name: str) -> None:
    """In a step of each kind: prompts alone, chunks of many and of few tokens behind prefixes, decodes beside them."""
    config = CONFIGS[name]
    attention = cases.original(config).to("cuda", torch.bfloat16)
    layer, exact = cases.ours(config, attention), copy.deepcopy(attention).float()
    lengths = {"a": 1000, "b": 600, "c": 300}
    hidden = {
        key: torch.randn(n, 2048, generator=torch.Generator().manual_seed(n)).to("cuda", torch.bfloat16)
        for key, n in lengths.items()
    }
    server = cases.Server(layer, hidden, 40, 1024)
    server.join("a", "b", "c")
    for tokens in (
        {"a": 500, "b": 1}, {"c": 64, "a": 300, "b": 399}, {"a": 1, "c": 200, "b": 5}, {"a": 1, "b": 1, "c": 1},
        {"a": 3, "b": 4, "c": 5}, {"b": 190, "a": 195, "c": 30},
    ):  # fmt: skip
        server.step(tokens)
    for key, x in hidden.items():
        wanted = cases.run_original(exact, x.float())
        assert len(server.outputs[key]) == len(x)
        assert float((server.outputs[key].float() - wanted).norm() / wanted.norm()) < 0.01


@pytest.mark.parametrize(("name", "change"), cases.CHANGED, ids=[" ".join(case) for case in cases.CHANGED])
def test_a_change_of_a_module_counts_in_both_or_is_refused_where_decode_begins(name: str, change: str) -> None:
    """Made after steps of the layer as it was, which have read the weights and compiled the kernels."""
    config = CONFIGS["h16"]
    attention = cases.original(config).to("cuda", torch.bfloat16)
    layer, exact = cases.ours(config, attention), copy.deepcopy(attention).float()
    hidden = torch.randn(76, 2048, generator=torch.Generator().manual_seed(2)).to("cuda", torch.bfloat16)
    server = cases.Server(layer, {"before": hidden, "after": hidden}, 4, 128)
    server.join("before", "after")
    server.step({"before": 70})
    for _ in range(3):
        server.step({"before": 1})
    before = cases.run_original(exact, hidden.float())
    for module in (layer, exact):
        cases.CHANGES[change](module, name)
    after = cases.run_original(exact, hidden.float()).detach()
    server.step({"after": 70})
    if name == "kv_b_proj" and change in cases.REFUSED:
        with pytest.raises(UserError) as raised:
            server.step({"after": 1})
        assert str(raised.value).startswith(cases.REFUSED[change])
    else:
        for _ in range(6):
            server.step({"after": 1})
    for out, wanted in ((server.outputs["before"], before), (server.outputs["after"], after)):
        assert float((out.float() - wanted[: len(out)]).norm() / wanted[: len(out)].norm()) < 0.03
    assert float((after - before).norm() / before.norm()) > 0.09


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_changes_nothing(dtype: torch.dtype) -> None:
    config = CONFIGS["h16"]
    layer = cases.ours(config, cases.original(config).to("cuda", torch.bfloat16))
    hidden = torch.randn(1, 2048, device="cuda").bfloat16()
    found = []
    for enabled in (False, True):
        cache = LatentCache(1, 1, 64, columns=layer.columns, dtype=torch.bfloat16, device="cuda")
        with torch.autocast("cuda", dtype=dtype, enabled=enabled):
            found.append(layer(hidden, cache.pages[0], cache.extend({cache.join(): 1})))
    assert torch.equal(*found) and found[0].dtype == torch.bfloat16


def test_a_graph_captured_after_inference_mode_reads_the_weights_of_now() -> None:
    """Steps in inference mode leave nothing that another mode cannot write; the graph reads a weight that is changed
    in place through a state dict made before the first step."""
    config = CONFIGS["h16"]
    layer = cases.ours(config, cases.original(config).to("cuda", torch.bfloat16))
    held = layer.state_dict()
    with torch.inference_mode():
        cache = LatentCache(1, 2, 64, columns=layer.columns, dtype=torch.bfloat16, device="cuda")
        request = cache.join()
        kept = cache.extend({request: 1})
        hidden = torch.randn(1, 2048, device="cuda").bfloat16()
        layer(hidden, cache.pages[0], kept)
    given, graph = hidden.clone(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = layer(given, cache.pages[0], kept)
    for weight in held.values():
        weight.copy_(weight.roll(1, 0))
    step = cache.extend({request: 1})
    for name in ("page_table", "seq_lens", "positions", "slots"):
        getattr(kept, name).copy_(getattr(step, name))
    graph.replay()
    replayed = out.clone()
    assert torch.equal(replayed, layer(given, cache.pages[0], step))
    assert not any(weight.is_inference() for weight in layer.parameters())
    layer.q_a_proj(given).sum().backward()
