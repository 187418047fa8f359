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
    ],
    ids=["missing", "shape", "unknown"],
)
def test_a_checkpoint_that_does_not_fit_is_refused(change: Any, message: str) -> None:
    state = dict(cases.original(config()).state_dict())
    change(state)
    with pytest.raises(UserError) as raised:
        MlaAttention(config()).load_state_dict(state)
    assert str(raised.value) == message


@pytest.fixture
def blocks() -> dict[str, Any]:
    """A block-FP8 checkpoint that loads."""
    return in_fp8(dict(cases.original(config()).state_dict()))


def refusal(state: dict[str, Any], prefix: str = "") -> str:
    """Also as a part of a larger module, whose load_state_dict knows nothing of scales."""
    layer = MlaAttention(config())
    before = {name: weight.clone() for name, weight in layer.state_dict().items()}
    model: Any = torch.nn.ModuleDict({"attention": layer}) if prefix else layer
    with pytest.raises(UserError) as raised:
        model.load_state_dict({prefix + name: x for name, x in state.items()})
    assert all(torch.equal(weight, before[name]) for name, weight in layer.state_dict().items()), "nothing was loaded"
    return str(raised.value)


PLAIN = "bfloat16, float16, float32, float64"
CODES = "float8_e4m3fn, float8_e4m3fnuz, float8_e5m2, float8_e5m2fnuz, int8"
BITS_8 = CODES.split(", ")


def codes(dtype: str, *shape: int) -> Any:
    """A weight of every code of a dtype that is a finite number, in turn."""
    bits = torch.arange(256, dtype=torch.uint8)
    finite = bits[bits.view(getattr(torch, dtype)).float().isfinite()]
    rows, columns = shape
    return finite.repeat(-(-rows * columns // len(finite)))[: rows * columns].view(getattr(torch, dtype)).view(shape)


@pytest.mark.parametrize("dtype", BITS_8)
@pytest.mark.parametrize("name", ["q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"])
@pytest.mark.parametrize("prefix", ["", "attention."])
def test_codes_of_8_bits_load_with_their_scales_alone(
    dtype: str, name: str, prefix: str, blocks: dict[str, Any]
) -> None:
    key = f"{name}.weight"
    rows, columns = blocks[key].shape
    blocks[key] = codes(dtype, rows, columns)
    assert blocks[key].dtype == getattr(torch, dtype)
    scales = blocks[f"{key}_scale_inv"]
    layer = MlaAttention(config())
    layer.load_state_dict(blocks)
    wanted = torch.empty(rows, columns)
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            block = (slice(128 * i, 128 * i + 128), slice(128 * j, 128 * j + 128))
            wanted[block] = blocks[key][block].float() * scales[i, j]
    assert torch.equal(layer.get_parameter(key), wanted)
    del blocks[f"{key}_scale_inv"]
    assert refusal(blocks, prefix) == (
        f"{prefix}{key} is torch.{dtype} and has no {prefix}{key}_scale_inv: codes of 8 bits need their scales."
    )


@pytest.mark.parametrize("scaled", [True, False])
@pytest.mark.parametrize("dtype", ["uint8", "bool", "int16", "int32", "int64", "float8_e8m0fnu", "complex64"])
def test_weights_that_are_neither_numbers_nor_codes_are_refused(
    dtype: str, scaled: bool, blocks: dict[str, Any]
) -> None:
    """uint8 among them: it does not say of which 8-bit float its bits are."""
    blocks["o_proj.weight"] = torch.ones(blocks["o_proj.weight"].shape).to(getattr(torch, dtype))
    if not scaled:
        del blocks["o_proj.weight_scale_inv"]
    assert refusal(blocks) == (
        f"o_proj.weight is torch.{dtype}: load it in {PLAIN}, or with o_proj.weight_scale_inv in {CODES}; bits of one "
        "of these that were stored in another dtype are to be viewed as it first."
    )


@pytest.mark.parametrize("dtype", ["uint8", "float8_e8m0fnu"])
@pytest.mark.parametrize("weights", BITS_8)
def test_scales_of_8_bits_are_powers_of_two(weights: str, dtype: str, blocks: dict[str, Any]) -> None:
    exponents = [[120, 127, 0], [130, 254, 1]]
    bits = torch.tensor(exponents, dtype=torch.uint8)
    blocks["q_a_proj.weight"] = torch.ones(256, 320).to(getattr(torch, weights))
    blocks["q_a_proj.weight_scale_inv"] = bits.view(getattr(torch, dtype))
    layer = MlaAttention(config(), dtype=torch.float64)
    layer.load_state_dict(blocks)
    for i, row in enumerate(exponents):
        for j, exponent in enumerate(row):
            block = layer.q_a_proj.weight[128 * i : 128 * i + 128, 128 * j : 128 * j + 128]
            assert torch.all(block == 2.0 ** (exponent - 127)), (i, j)
    blocks["q_a_proj.weight_scale_inv"] = torch.full((2, 3), 255, dtype=torch.uint8).view(getattr(torch, dtype))
    layer.load_state_dict(blocks)
    assert bool(layer.q_a_proj.weight.isnan().all()), "255 is NaN, in both"


@pytest.mark.parametrize("dtype", PLAIN.split(", "))
def test_scales_of_other_floats_are_numbers(dtype: str, blocks: dict[str, Any]) -> None:
    blocks["q_a_proj.weight"] = torch.ones(256, 320).to(torch.float8_e4m3fn)
    blocks["q_a_proj.weight_scale_inv"] = torch.tensor([[0.5, 1.75, 3.0]] * 2).to(getattr(torch, dtype))
    layer = MlaAttention(config())
    layer.load_state_dict(blocks)
    assert layer.q_a_proj.weight[0, [0, 128, 256]].tolist() == [0.5, 1.75, 3.0]


@pytest.mark.parametrize("dtype", ["int8", "int32", "int64", "bool", "float8_e4m3fn", "float8_e5m2"])
def test_scales_of_other_dtypes_are_refused(dtype: str, blocks: dict[str, Any]) -> None:
    blocks["q_b_proj.weight_scale_inv"] = torch.ones(1, 2).to(getattr(torch, dtype))
    assert refusal(blocks) == (
        f"q_b_proj.weight_scale_inv is torch.{dtype}: scales are {PLAIN}, or powers of two in float8_e8m0fnu or as its "
        "bits in uint8."
    )


@pytest.mark.parametrize("prefix", ["", "attention."])
@pytest.mark.parametrize("dtype", PLAIN.split(", "))
def test_scales_beside_a_weight_that_is_no_code_are_refused(dtype: str, prefix: str, blocks: dict[str, Any]) -> None:
    """Nothing says whether they are a left-over or are still to be multiplied with."""
    blocks["q_b_proj.weight"] = blocks["q_b_proj.weight"].to(getattr(torch, dtype))
    assert refusal(blocks, prefix) == (
        f"{prefix}q_b_proj.weight is torch.{dtype} and has scales beside it, {prefix}q_b_proj.weight_scale_inv: drop "
        "them if it is dequantised already, or load the weight of 8 bits that they belong to."
    )


@pytest.mark.parametrize("name", ["q_a_layernorm.weight", "kv_a_layernorm.weight", "o_proj.bias"])
@pytest.mark.parametrize("shape", [(1, 1), (2,), ()], ids=str)
def test_norms_and_biases_have_no_scales(name: str, shape: tuple[int, ...]) -> None:
    state = in_fp8(dict(cases.original(config(attention_bias=True)).state_dict()))
    layer = MlaAttention(config(attention_bias=True))
    layer.load_state_dict(state)
    state[f"{name}_scale_inv"] = torch.ones(shape)
    with pytest.raises(UserError) as raised:
        layer.load_state_dict(state)
    assert str(raised.value) == (
        f"{name} is torch.float32 and has scales beside it, {name}_scale_inv: blocks of 128x128 are of projections "
        "alone, so drop them."
    )
    for dtype in ("uint8", *BITS_8):
        state[name] = torch.ones(state[name].shape).to(getattr(torch, dtype))
        for given in (state, {key: x for key, x in state.items() if key != f"{name}_scale_inv"}):
            with pytest.raises(UserError) as raised:
                layer.load_state_dict(given)
            assert str(raised.value) == (
                f"{name} is torch.{dtype}: norms and biases have no scales, so load it in {PLAIN}."
            )


@pytest.mark.parametrize("shape", [(1, 1), (2, 1), (1, 2, 1), (2,), (96, 1), ()], ids=str)
def test_scales_of_other_blocks_are_refused(shape: tuple[int, ...], blocks: dict[str, Any]) -> None:
    blocks["q_b_proj.weight_scale_inv"] = torch.ones(shape)
    assert refusal(blocks) == (
        f"q_b_proj.weight_scale_inv is {shape} for a weight of (96, 256): blocks of 128x128 have (1, 2)."
    )


def test_scales_that_come_without_their_weight_are_refused(blocks: dict[str, Any]) -> None:
    """As where a checkpoint is loaded file by file."""
    layer = MlaAttention(config())
    alone = {"kv_b_proj.weight_scale_inv": blocks["kv_b_proj.weight_scale_inv"]}
    with pytest.raises(UserError) as raised:
        layer.load_state_dict(alone, strict=False)
    assert str(raised.value) == (
        "the checkpoint has kv_b_proj.weight_scale_inv and no kv_b_proj.weight: load a weight and its scales at once."
    )


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


class Bare:
    """A config of its own, with the fields that the layer reads and no base class of transformers."""

    model_type = "deepseek_v3"

    def __init__(self, **changes: Any) -> None:
        fields = {**cases.SMALL, "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}} | changes
        self.__dict__.update({name: value for name, value in fields.items() if value is not Ellipsis})


def test_a_config_of_ones_own_is_read() -> None:
    shape = MlaAttention(Bare()).shape
    assert shape == MlaAttention(cases.v3()).shape
    assert MlaAttention(Bare(q_lora_rank=None)).shape.q_rank is None


@pytest.mark.parametrize(
    "given, message",
    [
        *(
            (
                {"model_type": f"deepseek_v{version}", "hidden_size": 96},
                (
                    "config is of type dict: pass the model's config of transformers, as "
                    f"DeepseekV{version}Config(**config) gives it."
                ),
            )
            for version in (2, 3)
        ),
        *(
            (
                given,
                (
                    f"config is of type {type(given).__name__}: pass the model's config of transformers, as "
                    "AutoConfig.from_pretrained(name) gives it."
                ),
            )
            for given in ("deepseek-ai/DeepSeek-V3", None, 3)
        ),
        *(
            (Bare(**{name: ...}), f"Bare has no {name}: set it to the model's, an integer of 1 or more.")
            for name in sorted({*cases.SMALL} - {"num_key_value_heads"})
        ),
        *(
            (
                Bare(kv_lora_rank=value),
                f"Bare has kv_lora_rank = {value!r}: set it to the model's, an integer of 1 or more.",
            )
            for value in (None, 0, -1, 32.0, True, "32")
        ),
        *(
            (
                Bare(rope_parameters=value),
                f"Bare has {found}: set them to the model's, as {{'rope_type': 'default', 'rope_theta': 10000.0}}.",
            )
            for value, found in (
                (..., "no rope_parameters"),
                (None, "rope_parameters = None"),
                ({}, "rope_parameters = {}"),
                ([], "rope_parameters = []"),
            )
        ),
        (
            Bare(rope_parameters={"rope_theta": 10000.0}),
            "rope_parameters of Bare have no rope_type: set it to 'default' or 'yarn'.",
        ),
        (
            Bare(rope_parameters={"rope_type": "default"}),
            (
                "rope_parameters of Bare, of rope_type 'default', have no rope_theta: set it to the model's, a number "
                "above 0."
            ),
        ),
        *(
            (
                Bare(rope_parameters=cases.YARN | {"factor": value}),
                (
                    f"rope_parameters of Bare, of rope_type 'yarn', have factor = {value!r}: set it to the model's, a "
                    "number above 0."
                ),
            )
            for value in (None, 0, -4.0, "4", True, float("nan"))
        ),
        (
            Bare(rope_parameters={name: x for name, x in cases.YARN.items() if name != "factor"}),
            "rope_parameters of Bare, of rope_type 'yarn', have no factor: set it to the model's, a number above 0.",
        ),
    ],
)
def test_a_config_that_lacks_something_is_refused_by_the_fields_name(given: Any, message: str) -> None:
    with pytest.raises(UserError) as raised:
        MlaAttention(given)
    assert str(raised.value) == message


@pytest.mark.parametrize("change", [{"factor": 4}, {"factor": None, "mscale_all_dim": None}, {"factor": 0.5}])
def test_factors_that_transformers_takes_are_taken(change: dict[str, Any]) -> None:
    given = config(rope_parameters=cases.YARN | change)
    attention = cases.original(given)
    hidden = torch.randn(20, 320, generator=torch.Generator().manual_seed(0))
    (out,) = cases.prefill_and_decode(cases.ours(given, attention), [hidden], [18], 2)
    torch.testing.assert_close(out, cases.run_original(attention, hidden), atol=2e-5, rtol=0)


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
