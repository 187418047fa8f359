"""`MlaAttention` on a CPU against transformers' modules with the same weights."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers", reason="transformers is in the extra `layers`: make test installs it")

import layer_cases as cases  # noqa: E402

from mla_var3.layers import LatentCache, MlaAttention  # noqa: E402
from mla_var3.layers.attention import cached_rows, decode_on_cpu  # noqa: E402
from mla_var3.workload.decode import mla_decode_reference  # noqa: E402

STEPS = 32
#: float32 against float32 in another order of sums: a sum of n products has a relative error of about sqrt(n) · 2^-24,
#: 2e-6 at most here, and a handful of them follow each other. A wrong scale or rotation moves outputs by 1e-2 and more.
BOUND = 1e-5

CONFIGS = {
    "v3": cases.v3(),
    "v3, q in one step": cases.v3(q_lora_rank=None),
    "v3, halves": cases.v3(rope_interleave=False),
    "v3, yarn": cases.v3(rope_parameters=dict(cases.YARN)),
    "v3, yarn, halves, other mscale": cases.v3(rope_parameters=cases.YARN | {"mscale": 1.0}, rope_interleave=False),
    "v3, yarn without mscale": cases.v3(rope_parameters=cases.YARN | {"mscale": None, "mscale_all_dim": None}),
    "v3, bias": cases.v3(attention_bias=True),
    "v3, real widths": cases.v3(**cases.REAL, rope_parameters=dict(cases.YARN)),
    "v2": cases.v2(),
    "v2, halves": cases.v2(rope_interleave=False),  # which transformers' V2 does not read
    "v2, yarn, halves": cases.v2(rope_interleave=False, rope_parameters=dict(cases.YARN)),
    "v2 lite": cases.v2(q_lora_rank=None, rope_parameters=dict(cases.YARN)),
    "kimi": cases.kimi(),
}


def random_hidden(config: Any, tokens: int, seed: int) -> Any:
    return torch.randn(tokens, config.hidden_size, generator=torch.Generator().manual_seed(seed))


def error(out: Any, reference: Any) -> float:
    """The largest difference, of the largest value."""
    assert out.shape == reference.shape
    return float((out - reference).abs().max() / reference.abs().max())


@pytest.mark.parametrize("name", CONFIGS)
def test_prefill_and_decode_are_those_of_transformers(name: str) -> None:
    config = CONFIGS[name]
    attention = cases.original(config)
    prompts = [70, 64, 1, 129]
    hidden = [random_hidden(config, tokens + STEPS, seed) for seed, tokens in enumerate(prompts)]
    outputs = cases.prefill_and_decode(cases.ours(config, attention), hidden, prompts, STEPS)
    for out, x in zip(outputs, hidden, strict=True):
        assert error(out, cases.run_original(attention, x)) < BOUND


@pytest.mark.parametrize(
    "change",
    [
        {"rope_interleave": False},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}},
        {"rope_parameters": cases.YARN | {"mscale_all_dim": 1.0}},
        {"rope_parameters": cases.YARN | {"beta_fast": 1}},
        {"rope_parameters": cases.YARN | {"rope_theta": 50000.0}},
    ],
    ids=["layout", "no yarn", "mscale", "beta", "theta"],
)
def test_every_field_of_rope_moves_the_output_by_far_more_than_the_bound(change: dict[str, Any]) -> None:
    config, other = (cases.v3(**{"rope_parameters": dict(cases.YARN)} | c) for c in ({}, change))
    attention = cases.original(config)
    hidden = [random_hidden(config, 132, 0)]
    (out,), (moved,) = (
        cases.prefill_and_decode(cases.ours(c, attention), hidden, [100], STEPS) for c in (config, other)
    )
    assert error(moved, out) > 100 * BOUND


def test_norms_have_the_epsilon_of_transformers_whatever_the_config_says() -> None:
    config = cases.v3(rms_norm_eps=1e-2)
    attention = cases.original(config)
    hidden = [random_hidden(config, 40, 0) * 1e-3]  # whose squares are as small as the epsilon
    (out,) = cases.prefill_and_decode(cases.ours(config, attention), hidden, [8], STEPS)
    assert error(out, cases.run_original(attention, hidden[0])) < BOUND


@pytest.mark.parametrize("name", ["v3", "v3, halves", "v2 lite"])
def test_errors_in_bf16_are_no_larger_than_those_of_transformers(name: str) -> None:
    cases.assert_rounded_as_often(cases.rounding_errors(CONFIGS[name], [150, 64, 1], STEPS, "cpu"))


def test_requests_leave_and_join() -> None:
    """A cache of five pages serves three requests of up to three: pages change hands, and hold NaN in between."""
    config = CONFIGS["v3, yarn"]
    attention = cases.original(config)
    lengths = {"a": 150, "b": 64, "c": 130}
    hidden = {name: random_hidden(config, n, seed) for seed, (name, n) in enumerate(lengths.items())}
    server = cases.Server(cases.ours(config, attention), hidden, num_pages=5, max_tokens=192)
    server.join("a", "b")
    server.step({"a": 100, "b": 60})
    for _ in range(4):
        server.step({"b": 1, "a": 1})
    server.leave("b")
    server.step({"a": 1})
    server.join("c")
    server.step({"c": 120})
    assert server.cache.free_pages == 1
    for _ in range(10):
        server.step({"a": 1, "c": 1})
    server.leave("c")
    for _ in range(35):
        server.step({"a": 1})
    for name, x in hidden.items():
        assert error(server.outputs[name], cases.run_original(attention, x)) < BOUND


def test_prompts_in_chunks_beside_decodes() -> None:
    config = CONFIGS["v3, yarn"]
    attention = cases.original(config)
    hidden = {name: random_hidden(config, n, n) for name, n in (("a", 140), ("b", 75))}
    server = cases.Server(cases.ours(config, attention), hidden, num_pages=5, max_tokens=192)
    server.join("a", "b")
    for tokens in ({"a": 50}, {"a": 70, "b": 1}, {"b": 70, "a": 1}, {"a": 1, "b": 1}, {"a": 18, "b": 3}):
        server.step(tokens)
    for name, x in hidden.items():
        assert error(server.outputs[name], cases.run_original(attention, x)) < BOUND


def test_decode_on_a_cpu_against_the_oracle() -> None:
    """The oracle of the kernels, in float64, over a cache whose pages are not in order."""
    k, p, h = 32, 8, 4
    cache = LatentCache(1, 8, 192, columns=k + p)
    cache.pages.normal_()
    first, second, third = cache.join(), cache.join(), cache.join()
    cache.extend({first: 64, second: 1})
    cache.extend({first: 1, third: 128})
    step = cache.extend({third: 1, first: 1, second: 1})
    assert step.page_table.tolist()[1][:2] == [0, 2] and step.seq_lens.tolist() == [129, 66, 2]
    q = torch.randn(3, h, k + p)
    reference, _ = mla_decode_reference(
        q[:, None], cache.pages[0][:, :, None], step.page_table, step.seq_lens, k=k, scale=0.3, causal=False
    )
    out = decode_on_cpu(q, cache.pages[0], step, k, 0.3)
    torch.testing.assert_close(out.double(), reference[:, 0], atol=2e-6, rtol=2e-6)


def test_rows_of_the_cache_hold_normed_latent_and_rotated_rope() -> None:
    """What other readers of the cache rely on: columns of the interleaved layout stay where they are."""
    config = CONFIGS["v2"]  # transformers' V2 keeps the interleaved columns in place as well
    attention = cases.original(config)
    hidden = random_hidden(config, 70, 0)
    layer = cases.ours(config, attention)
    cache = LatentCache(1, 2, 128, columns=layer.columns)
    step = cache.extend({cache.join(): 70})
    layer(hidden, cache.pages[0], step)
    latent, rope = attention.kv_a_proj_with_mqa(hidden).split([32, 8], -1)
    angles = torch.arange(70.0)[:, None] / 10000.0 ** (torch.arange(0, 8, 2) / 8)
    turned = torch.view_as_complex(rope.unflatten(-1, (-1, 2))) * torch.polar(torch.ones_like(angles), angles)
    expected = torch.cat([attention.kv_a_layernorm(latent), torch.view_as_real(turned).flatten(-2)], -1)
    torch.testing.assert_close(cached_rows(cache.pages[0], step, 0), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", ["v3", "v3, yarn", "kimi"])
def test_angles_are_those_of_transformers_also_in_a_module_of_bf16(name: str) -> None:
    config = CONFIGS[name]
    rotary = cases.modeling_deepseek_v3.DeepseekV3RotaryEmbedding(cases.original(config).config)
    positions = torch.tensor([0, 1, 63, 4095, 163839])
    cos, sin = rotary(torch.empty(0), positions[None])
    ours = MlaAttention(config).to(torch.bfloat16).rope.angles(positions)
    half = config.qk_rope_head_dim // 2
    for mine, theirs in zip(ours, (cos, sin), strict=True):
        torch.testing.assert_close(mine[:, 0], theirs[0, :, :half], atol=0, rtol=0)
