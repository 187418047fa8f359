"""What is put around the modules of `MlaAttention`, or changed in them, counts in prefill and in decode, or is refused;
decode by torch, and by the functions of `mla_var3.ops`."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers", reason="transformers is in the extra `layers`: make test installs it")

import layer_cases as cases  # noqa: E402
from layer_cases import CHANGED, CHANGES, PARTS, REFUSED, OnKernels, Server  # noqa: E402

from mla_var3.errors import UserError  # noqa: E402
from mla_var3.layers import LatentCache, MlaAttention  # noqa: E402
from mla_var3.layers.attention import DOWN, behind  # noqa: E402

CONFIG = cases.v3(v_head_dim=16)  # values as wide as keys without rope, as absorb_gemm wants them
BIASED = cases.v3(v_head_dim=16, attention_bias=True)
#: Of each way to decode its class, its dtype, and the bound of errors: of the largest value in float32 (as in
#: test_mla_attention.py), and of the root mean square in bf16, which is rounded to at 2^-9, some ten times.
WAYS = {"torch": (MlaAttention, torch.float32, 1e-5), "kernels": (OnKernels, torch.bfloat16, 0.03)}


def setting(way: str, config: Any = CONFIG) -> tuple[Any, Any, Any]:
    """A layer that decodes this way, transformers' module in float32 with the same weights, and hidden states."""
    kind, dtype, _ = WAYS[way]
    exact = cases.original(config).to(torch.bfloat16).float()
    layer = kind(config, dtype=dtype)
    layer.load_state_dict(exact.state_dict())
    hidden = torch.randn(12, config.hidden_size, generator=torch.Generator().manual_seed(3)).bfloat16().to(dtype)
    return layer, exact, hidden


def error(way: str, out: Any, wanted: Any) -> float:
    out, wanted = out.detach().float(), wanted.detach().float()
    if way == "torch":
        return float((out - wanted).abs().max() / wanted.abs().max())
    return float((out - wanted).norm() / wanted.norm())


def decoded(layer: Any, hidden: Any, prompt: int = 8) -> Any:
    (out,) = cases.prefill_and_decode(layer, [hidden], [prompt], len(hidden) - prompt)
    return out


@pytest.mark.usefixtures("engine")
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("name", "change"), CHANGED, ids=[" ".join(case) for case in CHANGED])
def test_a_change_counts_in_both_or_is_refused_where_decode_begins(name: str, change: str, way: str) -> None:
    """Made after steps of the layer as it was, which decode has to notice."""
    layer, exact, hidden = setting(way)
    bound = WAYS[way][2]
    before = cases.run_original(exact, hidden.float())
    assert error(way, decoded(layer, hidden), before) < bound
    for module in (layer, exact):
        CHANGES[change](module, name)
    after = cases.run_original(exact, hidden.float())
    assert error(way, after, before) > 3 * bound, "the change moves outputs by more than rounding"
    server = Server(layer, {"a": hidden}, 1, 64)
    server.join("a")
    server.step({"a": 8})
    if name == "kv_b_proj" and change in REFUSED:
        cache = server.cache.pages.clone()
        with pytest.raises(UserError) as raised:
            server.step({"a": 1})
        message = str(raised.value)
        assert message.startswith(REFUSED[change]) and message.endswith("nn.Linear, or take it away.")
        assert torch.equal(cache.nan_to_num(7.0), server.cache.pages.nan_to_num(7.0)), "nothing was written"
    else:
        for _ in range(4):
            server.step({"a": 1})
    out = server.outputs["a"]
    assert error(way, out, after[: len(out)]) < bound


@pytest.mark.usefixtures("engine")
@pytest.mark.parametrize("way", WAYS)
def test_decode_goes_on_where_a_hook_is_taken_away(way: str) -> None:
    layer, exact, hidden = setting(way)
    hook = layer.kv_b_proj.register_forward_hook(lambda *_: None)
    with pytest.raises(UserError, match="kv_b_proj has a forward hook"):
        decoded(layer, hidden)
    hook.remove()
    assert error(way, decoded(layer, hidden), cases.run_original(exact, hidden.float())) < WAYS[way][2]


@pytest.mark.usefixtures("engine")
@pytest.mark.parametrize("way", WAYS)
def test_a_weight_whose_memory_is_not_the_weight_is_refused(way: str) -> None:
    class Quantised(torch.Tensor):
        pass

    layer, _, hidden = setting(way)
    layer.kv_b_proj.weight = torch.nn.Parameter(layer.kv_b_proj.weight.detach().as_subclass(Quantised))
    with pytest.raises(UserError, match="kv_b_proj has a weight of class Quantised: decode multiplies by its weight"):
        decoded(layer, hidden)


@pytest.mark.usefixtures("engine")
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", ["q_a_layernorm", "kv_a_layernorm"])
def test_a_norm_of_another_epsilon_counts(name: str, way: str) -> None:
    layer, exact, hidden = setting(way)
    hidden = hidden * 2**-6  # projections give about as much, whose squares are smaller than the epsilon
    getattr(layer, name).eps = getattr(exact, name).variance_epsilon = 1e-2
    wanted = cases.run_original(exact, hidden.float())
    assert error(way, decoded(layer, hidden), wanted) < WAYS[way][2]
    getattr(exact, name).variance_epsilon = 1e-6
    assert error(way, cases.run_original(exact, hidden.float()), wanted) > 0.3


@pytest.mark.usefixtures("engine")
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", DOWN)
def test_one_bias_taken_away_counts(name: str, way: str) -> None:
    layer, exact, hidden = setting(way, BIASED)
    before = cases.run_original(exact, hidden.float())
    assert error(way, decoded(layer, hidden), before) < WAYS[way][2]
    for module in (layer, exact):
        getattr(module, name).bias = None
    after = cases.run_original(exact, hidden.float())
    assert error(way, decoded(layer, hidden), after) < WAYS[way][2] < error(way, after, before) / 2


# ---------------------------------------------------------------- where weights lie
def together(layer: MlaAttention) -> list[bool]:
    """Of weights and of biases: whether those of both down-projections lie behind one another."""
    parts = (layer.q_a_proj, layer.kv_a_proj_with_mqa)
    return [behind([getattr(part, name) for part in parts]) is not None for name in ("weight", "bias")]


def test_weights_lie_behind_one_another_from_the_first_and_wherever_the_layer_goes() -> None:
    layer = MlaAttention(BIASED)
    assert together(layer) == [True, True]
    state = cases.original(BIASED).state_dict()
    layer.load_state_dict(state)
    stored = io.BytesIO()
    torch.save(layer, stored)
    stored.seek(0)
    copies = [layer, copy.deepcopy(layer), torch.load(stored, weights_only=False)]
    with torch.device("meta"):
        empty = MlaAttention(BIASED)
    assert together(empty) == [True, True]
    copies.append(empty.to_empty(device="cpu"))
    copies[-1].load_state_dict(state)
    copies.append(torch.nn.ModuleList([copy.deepcopy(layer)]).to(torch.float64)[0])
    copies.append(copy.deepcopy(layer).double().float())
    for made in copies:
        assert together(made) == [True, True]
        assert all(torch.equal(weight, state[name].to(weight)) for name, weight in made.state_dict().items())
        assert all(type(weight) is torch.nn.Parameter for weight in made.parameters())


def test_decode_moves_no_weight(engine: Any) -> None:
    """Tensors of a state dict, a flat buffer or a captured graph are those of the weights, before steps and after."""
    layer, exact, hidden = setting("kernels")
    flat = torch.ones(layer.q_a_proj.weight.numel() + 8, dtype=torch.bfloat16)
    mine = flat[8:].view_as(layer.q_a_proj.weight)
    for assigned in (False, True):
        if assigned:
            mine.copy_(layer.q_a_proj.weight.detach())
            layer.load_state_dict({**layer.state_dict(), "q_a_proj.weight": mine}, assign=True)
        assert together(layer)[0] is not assigned
        held = layer.state_dict()
        addresses = [weight.data_ptr() for weight in layer.parameters()]
        assert error("kernels", decoded(layer, hidden), cases.run_original(exact, hidden.float())) < 0.03
        assert addresses == [weight.data_ptr() for weight in layer.parameters()]
        for name, weight in held.items():
            weight.copy_(weight.roll(1, 0))
            exact.get_parameter(name).copy_(weight)
        assert error("kernels", decoded(layer, hidden), cases.run_original(exact, hidden.float())) < 0.03
    flat.neg_()
    exact.q_a_proj.weight.copy_(mine)
    assert error("kernels", decoded(layer, hidden), cases.run_original(exact, hidden.float())) < 0.03


def test_a_checkpoint_of_the_layer_is_written_and_read(tmp_path: Any) -> None:
    """Weights that share a memory are stored one by one."""
    safetensors = pytest.importorskip("safetensors.torch")
    layer = MlaAttention(BIASED)
    safetensors.save_file(layer.state_dict(), tmp_path / "layer.safetensors")
    other = MlaAttention(BIASED)
    other.load_state_dict(safetensors.load_file(tmp_path / "layer.safetensors"))
    assert all(torch.equal(weight, other.state_dict()[name]) for name, weight in layer.state_dict().items())


@pytest.mark.usefixtures("engine")
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("decode", [False, True], ids=["prefill", "decode"])
@pytest.mark.parametrize("name", PARTS)
def test_what_was_deleted_is_named(name: str, decode: bool, way: str) -> None:
    def deleted(layer: Any) -> None:
        delattr(layer, name)

    def emptied(layer: Any) -> None:
        setattr(layer, name, None)

    def without_weight(layer: Any) -> None:
        getattr(layer, name).weight = None

    def weight_deleted(layer: Any) -> None:
        del getattr(layer, name).weight

    def narrow(layer: Any) -> None:
        getattr(layer, name).weight = torch.nn.Parameter(getattr(layer, name).weight.detach()[:-1])

    gone = f"{name} is no module of the layer any more: every step needs it, so put it back."
    empty = f"{name} has no weight any more: every step reads it, so load it again or keep it."
    for change, message in ((deleted, gone), (emptied, gone), (without_weight, empty), (weight_deleted, empty)):
        layer, _, hidden = setting(way)
        decoded(layer, hidden)
        change(layer)
        with pytest.raises(UserError) as raised:
            decoded(layer, hidden[: 2 if decode else 1], 1)
        assert str(raised.value) == message
    layer, _, hidden = setting(way)
    shape = tuple(getattr(layer, name).weight.shape)
    narrow(layer)
    with pytest.raises(UserError) as raised:
        decoded(layer, hidden[: 2 if decode else 1], 1)
    assert str(raised.value) == f"{name}.weight is {(shape[0] - 1, *shape[1:])}: this config's layer has {shape}."


# ---------------------------------------------------------------- modes
@pytest.mark.usefixtures("engine")
@pytest.mark.parametrize("way", WAYS)
def test_inference_mode_first_and_training_later(way: str) -> None:
    """Weights that a step in inference mode has read can be trained, and its cache goes on outside."""
    layer, exact, hidden = setting(way)
    with torch.inference_mode():
        server = Server(layer, {"a": hidden}, 1, 64)
        server.join("a")
        server.step({"a": 4})
        server.step({"a": 1})
    server.outputs = {name: out.clone() for name, out in server.outputs.items()}
    server.step({"a": 3})
    server.step({"a": 1})
    kept = server.cache.extend({server.numbers["a"]: 1})
    for tensor in (kept.page_table, kept.seq_lens, kept.positions, kept.slots, server.cache.pages):
        assert not tensor.is_inference()
    out = server.outputs["a"]
    assert error(way, out, cases.run_original(exact, hidden.float())[: len(out)]) < WAYS[way][2]
    assert not any(weight.is_inference() for weight in layer.parameters())
    moved = {name: weight.clone() for name, weight in layer.state_dict().items()}
    optimizer = torch.optim.SGD(layer.parameters(), 0.1)
    query = layer.q_b_proj(layer.q_a_layernorm(layer.q_a_proj(hidden)))
    latent = layer.kv_a_proj_with_mqa(hidden)
    heads = layer.kv_b_proj(layer.kv_a_layernorm(latent[:, : layer.shape.k]))
    (query.square().sum() + layer.o_proj(heads[:, : layer.o_proj.in_features]).square().sum()).backward()
    optimizer.step()
    for name, weight in layer.named_parameters():
        assert not torch.equal(weight, moved[name]), name
        exact.get_parameter(name).copy_(weight)
    assert error(way, decoded(layer, hidden), cases.run_original(exact, hidden.float())) < WAYS[way][2]


@pytest.mark.parametrize("made_in", [torch.inference_mode, torch.no_grad], ids=["inference mode", "no_grad"])
def test_a_layer_made_in_a_mode_computes_outside_of_it(made_in: Any) -> None:
    with made_in():
        layer, exact, hidden = setting("torch")
    hidden = hidden.clone()
    assert error("torch", decoded(layer, hidden), cases.run_original(exact, hidden)) < 1e-5
    assert together(layer)[0]


@pytest.mark.usefixtures("engine")
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("prompt", [1, 12], ids=["decode", "prefill"])
def test_a_gradient_that_would_be_lost_is_refused(prompt: int, way: str) -> None:
    layer, exact, hidden = setting(way)
    wanted = cases.run_original(exact, hidden.float())
    leaf = hidden.clone().requires_grad_()
    cache = LatentCache(1, 1, 64, columns=layer.columns, dtype=hidden.dtype)
    request = cache.join()
    rest = leaf[:prompt] if prompt > 1 else leaf[:1]
    step = cache.extend({request: len(rest)})
    with pytest.raises(UserError) as raised:
        layer(rest, cache.pages[0], step)
    assert str(raised.value) == (
        "hidden requires a gradient and none is computed: call it under torch.no_grad(), or pass hidden.detach()."
    )
    for context, given in ((torch.no_grad(), rest), (torch.enable_grad(), rest.detach())):
        with context:
            out = layer(given, cache.pages[0], step)
        assert not out.requires_grad and error(way, out, wanted[: len(out)]) < WAYS[way][2]


@pytest.mark.usefixtures("engine")
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_changes_nothing(dtype: Any, way: str) -> None:
    """In place of products in a dtype that the cache has not."""
    layer, exact, hidden = setting(way)
    plain = decoded(layer, hidden)

    class Cast(torch.nn.Module):
        columns = layer.columns

        def forward(self, *given: Any) -> Any:
            with torch.autocast("cpu", dtype=dtype):
                out = layer(*given)
                assert torch.is_autocast_enabled("cpu")
            return out

    out = decoded(Cast(), hidden)
    assert torch.equal(out, plain)
    assert error(way, out, cases.run_original(exact, hidden.float())) < WAYS[way][2]


@pytest.mark.usefixtures("engine")
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("tokens", [1, 3], ids=["decode", "prefill"])
def test_other_dtypes_are_named(tokens: int, way: str) -> None:
    kind = WAYS[way][0]
    bf16, fp16, fp32 = torch.bfloat16, torch.float16, torch.float32
    own = "the layer computes in one dtype, so convert hidden, or the layer by layer.to(dtype) and its cache with it."
    for given, weights, cached, message in (
        (fp32, bf16, bf16, f"hidden is {fp32} and q_a_proj.weight is {bf16}: {own}"),
        (fp32, bf16, fp32, f"hidden is {fp32} and q_a_proj.weight is {bf16}: {own}"),
        (bf16, fp32, bf16, f"hidden is {bf16} and q_a_proj.weight is {fp32}: {own}"),
        (fp16, bf16, bf16, f"hidden is {fp16} and q_a_proj.weight is {bf16}: {own}"),
        (fp16, fp16, bf16, f"pages are (1, 64, 40) {bf16}: this layer needs (num_pages, 64, 40) in hidden's {fp16}."),
        (bf16, bf16, fp32, f"pages are (1, 64, 40) {fp32}: this layer needs (num_pages, 64, 40) in hidden's {bf16}."),
    ):
        layer = kind(CONFIG, dtype=weights)
        cache = LatentCache(1, 1, 64, columns=layer.columns, dtype=cached)
        step = cache.extend({cache.join(): tokens})
        with pytest.raises(UserError) as raised:
            layer(torch.zeros(tokens, CONFIG.hidden_size, dtype=given), cache.pages[0], step)
        assert str(raised.value) == message
    for name in PARTS:
        layer = kind(CONFIG, dtype=bf16)
        cache = LatentCache(1, 1, 64, columns=layer.columns, dtype=bf16)
        step, hidden = cache.extend({cache.join(): tokens}), torch.zeros(tokens, CONFIG.hidden_size, dtype=bf16)
        getattr(layer, name).float()
        with pytest.raises(UserError) as raised:
            layer(hidden, cache.pages[0], step)
        assert str(raised.value) == f"hidden is {bf16} and {name}.weight is {fp32}: {own}"
        getattr(layer, name).bfloat16()
        getattr(layer, name).register_forward_hook(lambda module, given, out: out.float())
        if name == "kv_b_proj" and tokens == 1:
            continue
        with pytest.raises(UserError) as raised:
            layer(hidden, cache.pages[0], step)
        assert str(raised.value) == (
            f"{name} gives {fp32} for {bf16}: the layer computes in one dtype, so let what was put there convert its "
            "result."
        )


def test_a_compiler_and_an_export_take_the_layer_whole() -> None:
    """What every step judges breaks no graph."""
    layer, exact, hidden = setting("torch")
    cache = LatentCache(1, 1, 64, columns=layer.columns)
    request = cache.join()
    layer(hidden[:8], cache.pages[0], cache.extend({request: 8}))
    step, wanted = cache.extend({request: 1}), cases.run_original(exact, hidden[:9])[8:]
    compiled = torch.compile(layer, backend="eager", fullgraph=True)
    assert error("torch", compiled(hidden[8:9], cache.pages[0], step), wanted) < 1e-5

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = layer

        def forward(self, given: Any, pages: Any) -> Any:
            return self.layer(given, pages, step)

    exported = torch.export.export(Model(), (hidden[8:9], cache.pages[0])).module()
    assert error("torch", exported(hidden[8:9], cache.pages[0]), wanted) < 1e-5
