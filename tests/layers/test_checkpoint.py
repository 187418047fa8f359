"""Loading: block-FP8 weights, and checkpoints and configs that do not fit."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers", reason="transformers is in the extra `layers`: make test installs it")

import layer_cases as cases  # noqa: E402
from transformers import DeepseekV32Config, Kimi_K25Config, LlamaConfig  # noqa: E402

from mla_var3.errors import UserError  # noqa: E402
from mla_var3.layers import MlaAttention  # noqa: E402

#: Weights of more than one block, of whole ones and of parts: 320 = 2.5 · 128, 200 + 8 columns of the cache.
SIZES: dict[str, Any] = {"hidden_size": 320, "q_lora_rank": 256, "kv_lora_rank": 200, "num_attention_heads": 4}


def config(**changes: Any) -> Any:
    return cases.v3(**SIZES | changes)


def in_fp8(state: dict[str, Any]) -> dict[str, Any]:
    """The state dict as a block-FP8 checkpoint: projections in e4m3 with the scale of each block, that of its largest
    value; norms as they are."""
    made = {}
    for name, weight in state.items():
        if weight.dim() == 1:
            made[name] = weight
            continue
        rows, columns = (-(-n // 128) for n in weight.shape)
        scales, quantised = torch.empty(rows, columns), torch.empty_like(weight, dtype=torch.float8_e4m3fn)
        for i in range(rows):
            for j in range(columns):
                block = (slice(128 * i, 128 * i + 128), slice(128 * j, 128 * j + 128))
                scales[i, j] = weight[block].abs().max() / 448
                quantised[block] = (weight[block] / scales[i, j]).to(torch.float8_e4m3fn)
        made[name], made[f"{name}_scale_inv"] = quantised, scales
    return made


@pytest.mark.parametrize("prefix", ["", "model.layers.3.self_attn."])
def test_block_fp8_is_dequantised_on_loading(prefix: str) -> None:
    state = cases.original(config()).state_dict()
    checkpoint = {prefix + name: x for name, x in in_fp8(state).items()}
    given = set(checkpoint)
    assert f"{prefix}kv_a_proj_with_mqa.weight_scale_inv" in given
    layer = MlaAttention(config())
    model: Any = layer
    for name in reversed(prefix.split(".")[:-1]):
        model = torch.nn.ModuleDict({name: model})
    model.load_state_dict(checkpoint)
    assert set(checkpoint) == given, "the caller's dict is the caller's"
    for name, weight in layer.named_parameters():
        assert weight.dtype == torch.float32
        if weight.dim() == 1:
            assert torch.equal(weight, state[name])
            continue
        # e4m3 has three bits behind the point, and its smallest step is 2^-9 of a scale.
        step = state[name].abs().max() / 448 * 2**-9
        assert torch.all((weight - state[name]).abs() <= state[name].abs() * 2**-4 + step), name
        assert not torch.equal(weight, state[name]), name


def test_each_block_has_its_own_scale() -> None:
    state = cases.original(config()).state_dict()
    checkpoint = in_fp8(state)
    checkpoint["q_b_proj.weight"] = torch.ones(96, 256).to(torch.float8_e4m3fn)
    checkpoint["q_b_proj.weight_scale_inv"] = torch.tensor([[3.0, 0.7]])
    layer = MlaAttention(config(), dtype=torch.bfloat16)
    layer.load_state_dict(checkpoint)
    weight = layer.q_b_proj.weight
    assert weight.dtype == torch.bfloat16
    assert torch.all(weight[:, :128] == 3.0) and torch.all(weight[:, 128:] == torch.tensor(0.7).bfloat16())


def test_a_bf16_checkpoint_goes_into_a_layer_of_another_dtype() -> None:
    state = {name: x.bfloat16() for name, x in cases.original(config()).state_dict().items()}
    layer = MlaAttention(config())
    layer.load_state_dict(state)
    assert torch.equal(layer.o_proj.weight, state["o_proj.weight"].float())


@pytest.mark.parametrize("rope_type", ["default", "yarn"])
def test_a_layer_built_on_meta_computes_once_its_weights_are_there(rope_type: str) -> None:
    rope = {"rope_type": "default", "rope_theta": 10000.0} if rope_type == "default" else dict(cases.YARN)
    attention = cases.original(config(rope_parameters=rope))
    with torch.device("meta"):
        layer = MlaAttention(config(rope_parameters=rope))
    assert layer.o_proj.weight.is_meta
    layer.load_state_dict(attention.state_dict(), assign=True)
    hidden = torch.randn(20, 320, generator=torch.Generator().manual_seed(0))
    (out,) = cases.prefill_and_decode(layer, [hidden], [18], 2)
    torch.testing.assert_close(out, cases.run_original(attention, hidden), atol=2e-5, rtol=0)


def without(name: str) -> Any:
    def change(state: dict[str, Any]) -> None:
        del state[name]

    return change


def replaced(name: str, value: Any) -> Any:
    def change(state: dict[str, Any]) -> None:
        state[name] = value

    return change


@pytest.mark.parametrize(
    "change, message",
    [
        (
            without("q_a_layernorm.weight"),
            "the checkpoint has no q_a_layernorm.weight, which this config's layer needs.",
        ),
        (
            replaced("o_proj.weight", torch.zeros(320, 47)),
            "o_proj.weight is (320, 47) in the checkpoint and (320, 48) in this config's layer.",
        ),
        (
            replaced("q_proj.weight", torch.zeros(1, 1)),
            "the checkpoint has q_proj.weight, which this config's layer has not.",
        ),
        (
            replaced("kv_b_proj.weight", torch.zeros(112, 200, dtype=torch.float8_e4m3fn)),
            "kv_b_proj.weight is FP8 and has no kv_b_proj.weight_scale_inv: its scales are needed.",
        ),
        (
            replaced("q_b_proj.weight_scale_inv", torch.ones(1, 1)),
            "q_b_proj.weight_scale_inv is (1, 1) for a weight of (96, 256): blocks of 128x128 have (1, 2).",
        ),
    ],
    ids=["missing", "shape", "unknown", "no scales", "other blocks"],
)
def test_a_checkpoint_that_does_not_fit_is_refused(change: Any, message: str) -> None:
    state = dict(cases.original(config()).state_dict())
    change(state)
    with pytest.raises(UserError) as raised:
        MlaAttention(config()).load_state_dict(state)
    assert str(raised.value) == message


def test_only_what_is_there_is_judged_when_not_strict() -> None:
    state = cases.original(config()).state_dict()
    layer = MlaAttention(config())
    layer.load_state_dict({"o_proj.weight": state["o_proj.weight"]}, strict=False)
    assert torch.equal(layer.o_proj.weight, state["o_proj.weight"])
    with pytest.raises(UserError, match=r"o_proj.weight is \(1, 1\)"):
        layer.load_state_dict({"o_proj.weight": torch.zeros(1, 1)}, strict=False)


@pytest.mark.parametrize(
    "given, message",
    [
        (LlamaConfig(), "LlamaConfig is of model type 'llama': MlaAttention is the attention of deepseek_v2, "),
        (DeepseekV32Config(), "DeepseekV32Config is of model type 'deepseek_v32': MlaAttention is the attention of "),
        (
            config(rope_parameters={"rope_type": "dynamic", "factor": 2.0}),
            "rope_type 'dynamic' is not supported: MlaAttention has default and yarn.",
        ),
    ],
    ids=["no MLA", "another MLA", "rope"],
)
def test_a_config_of_another_attention_is_refused(given: Any, message: str) -> None:
    with pytest.raises(UserError) as raised:
        MlaAttention(given)
    assert str(raised.value).startswith(message) and str(raised.value).count(".") == 1


def test_the_text_part_of_a_multimodal_config_is_taken() -> None:
    text = cases.SMALL | {"model_type": "kimi_k2", "hidden_size": 64}
    layer = MlaAttention(Kimi_K25Config(text_config=text))
    assert layer.shape.hidden == 64 and layer.shape.q_rank == cases.SMALL["q_lora_rank"]


def test_hidden_states_and_pages_that_do_not_fit_are_refused() -> None:
    from mla_var3.layers import LatentCache

    layer = MlaAttention(config())
    cache = LatentCache(1, 1, 64, columns=208)
    step = cache.extend({cache.join(): 3})
    with pytest.raises(UserError, match=r"hidden is \(2, 320\) and the step has 3 tokens of 320 columns"):
        layer(torch.zeros(2, 320), cache.pages[0], step)
    for pages in (torch.zeros(1, 64, 576), torch.zeros(1, 64, 208, dtype=torch.bfloat16), torch.zeros(1, 32, 208)):
        with pytest.raises(UserError, match=r"this layer needs \(num_pages, 64, 208\) in hidden's torch.float32"):
            layer(torch.zeros(3, 320), pages, step)
