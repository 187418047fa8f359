"""`MlaAttention`'s decode steps by the functions of `mla_var3.ops`, without a GPU: the torch versions compute."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers", reason="transformers is in the extra `layers`: make test installs it")

sys.path.insert(0, str(Path(__file__).parents[1] / "ops"))

import layer_cases as cases  # noqa: E402
from ops_fakes import CpuEngine  # noqa: E402

from mla_var3.dispatch import Choice  # noqa: E402
from mla_var3.errors import UserError  # noqa: E402
from mla_var3.kernel.registry import KernelId  # noqa: E402
from mla_var3.layers import LatentCache, MlaAttention  # noqa: E402
from mla_var3.layers.attention import joined  # noqa: E402
from mla_var3.ops import decode, layer  # noqa: E402

VERSIONS = {"norm": "rmsnorm", "rope": "rope_append", "gemm": "absorb_gemm", "decode": "flash_mla"}
SAME_WIDTH = {"v_head_dim": 16}  # as keys without rope: what absorb_gemm multiplies with
CONFIGS = {
    "v3": cases.v3(**SAME_WIDTH),
    "v3, bias": cases.v3(**SAME_WIDTH, attention_bias=True),
    "v3, yarn, halves": cases.v3(**SAME_WIDTH, rope_parameters=dict(cases.YARN), rope_interleave=False),
    "v2 lite": cases.v2(**SAME_WIDTH, q_lora_rank=None, rope_parameters=dict(cases.YARN)),
    "kimi": cases.kimi(**SAME_WIDTH),
}


class OnKernels(MlaAttention):
    """Decodes as on a GPU."""

    def forward(self, hidden: Any, pages: Any, step: Any) -> Any:
        with torch.no_grad():
            return self._by_kernels(hidden, pages, step) if step.decode else super().forward(hidden, pages, step)


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> CpuEngine:
    """Functions compute on the CPU, each by its torch version."""
    found = CpuEngine()

    def choice(problem: Any, *_: Any) -> Choice:
        return Choice(KernelId.parse(f"torch/{VERSIONS[problem.workload]}"), (), None, "a test's")

    for module in (decode, layer):
        monkeypatch.setattr(module, "engine", lambda: found)
        monkeypatch.setattr(module, "on_gpu", lambda *_: None)
    monkeypatch.setattr("mla_var3.dispatch.choose", choice)
    monkeypatch.setattr("mla_var3.dispatch.pick", choice)
    layer._way.cache_clear()
    decode.way_for.cache_clear()
    yield found
    layer._way.cache_clear()
    decode.way_for.cache_clear()


def of(config: Any, attention: Any) -> MlaAttention:
    made = OnKernels(config, dtype=torch.bfloat16)
    made.load_state_dict(attention.state_dict())
    return made


@pytest.mark.parametrize("name", CONFIGS)
def test_steps_have_the_rows_and_the_errors_of_those_by_torch(engine: CpuEngine, name: str) -> None:
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


def test_weights_are_joined_once_and_stay_parameters(engine: CpuEngine) -> None:
    config = CONFIGS["v3, bias"]
    attention = cases.original(config).to(torch.bfloat16)
    made = of(config, attention)
    before = {name: weight.clone() for name, weight in made.state_dict().items()}
    cache = LatentCache(1, 2, 64, columns=made.columns, dtype=torch.bfloat16)
    requests = [cache.join(), cache.join()]
    hidden = torch.randn(2, config.hidden_size).bfloat16()
    addresses = []
    for _ in range(3):
        made(hidden, cache.pages[0], cache.extend(dict.fromkeys(requests, 1)))
        addresses.append((made.q_a_proj.weight.data_ptr(), made.kv_a_proj_with_mqa.weight.data_ptr()))
    assert len(set(addresses)) == 1
    assert addresses[0][1] - addresses[0][0] == made.q_a_proj.weight.numel() * 2
    after = made.state_dict()
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)


def test_other_weights_in_the_place_of_joined_ones_are_seen() -> None:
    parts = [torch.nn.Parameter(torch.randn(n, 8), requires_grad=False) for n in (3, 5)]
    assert torch.equal(joined(parts), torch.cat(list(parts)))
    one = joined(parts)
    parts[0].copy_(torch.ones(3, 8))
    assert torch.equal(one[:3], torch.ones(3, 8)), "a view, so weights that are written in place are seen"
    parts[1].data = torch.zeros(5, 8)
    assert torch.equal(joined(parts)[3:], torch.zeros(5, 8))


def test_a_request_past_the_longest_position_is_refused(engine: CpuEngine) -> None:
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
