"""`MlaAttention`'s decode steps by the functions of `mla_var3.ops`, without a GPU: the torch versions compute."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers", reason="transformers is in the extra `layers`: make test installs it")

import layer_cases as cases  # noqa: E402
from layer_cases import OnKernels  # noqa: E402

from mla_var3.errors import UserError  # noqa: E402
from mla_var3.layers import LatentCache, MlaAttention  # noqa: E402

SAME_WIDTH = {"v_head_dim": 16}  # as keys without rope: what absorb_gemm multiplies with
CONFIGS = {
    "v3": cases.v3(**SAME_WIDTH),
    "v3, bias": cases.v3(**SAME_WIDTH, attention_bias=True),
    "v3, yarn, halves": cases.v3(**SAME_WIDTH, rope_parameters=dict(cases.YARN), rope_interleave=False),
    "v2 lite": cases.v2(**SAME_WIDTH, q_lora_rank=None, rope_parameters=dict(cases.YARN)),
    "kimi": cases.kimi(**SAME_WIDTH),
}


def of(config: Any, attention: Any) -> MlaAttention:
    made = OnKernels(config, dtype=torch.bfloat16)
    made.load_state_dict(attention.state_dict())
    return made


@pytest.mark.parametrize("name", CONFIGS)
def test_steps_have_the_rows_and_the_errors_of_those_by_torch(engine: Any, name: str) -> None:
    config = CONFIGS[name]
    attention = cases.original(config).to(torch.bfloat16)
    exact = cases.original(config)
    exact.load_state_dict(attention.state_dict())
    prompts, steps = [70, 64, 1], 6
    generator = torch.Generator().manual_seed(1)
    hidden = [torch.randn(n + steps, config.hidden_size, generator=generator).bfloat16() for n in prompts]
    errors = {}
    for whose, made in (("kernels", of(config, attention)), ("torch", cases.ours(config, attention))):
        outputs = cases.prefill_and_decode(made, hidden, prompts, steps)
        wanted = [cases.run_original(exact, x.float()) for x in hidden]
        apart = torch.cat([(o.float() - w)[-steps:] for o, w in zip(outputs, wanted, strict=True)])
        errors[whose] = float(apart.norm() / torch.cat([w[-steps:] for w in wanted]).norm())
    assert engine.planned >= 5
    assert errors["kernels"] <= 1.25 * errors["torch"], errors


def test_a_request_past_the_longest_position_is_refused(engine: Any) -> None:
    config = cases.v3(**SAME_WIDTH, max_position_embeddings=3)
    made = OnKernels(config, dtype=torch.bfloat16)
    cache = LatentCache(1, 1, 64, columns=made.columns, dtype=torch.bfloat16)
    cache.pages.zero_()
    request = cache.join()
    cache.extend({request: 3})
    hidden = torch.zeros(1, config.hidden_size, dtype=torch.bfloat16)
    with pytest.raises(UserError, match="has 4 tokens: the model of this config is made for 3"):
        made(hidden, cache.pages[0], cache.extend({request: 1}))


def test_one_table_serves_all_layers() -> None:
    first, second = (MlaAttention(CONFIGS["v3"]) for _ in range(2))
    table = first.rope.table(torch.device("cpu"))
    assert second.rope.table(torch.device("cpu")) is table and table.shape == (4096, 8)
    cos, sin = first.rope.angles(torch.tensor([0, 17, 4095]))
    assert torch.equal(table[[0, 17, 4095]], torch.cat([cos[:, 0], sin[:, 0]], -1))
