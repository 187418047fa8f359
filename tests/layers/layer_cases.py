"""What the tests of this folder share: configs of models, transformers' own modules, and serving with our layer."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.nn.utils import parametrize
from transformers import DeepseekV2Config, DeepseekV3Config, PretrainedConfig
from transformers.models.deepseek_v2 import modeling_deepseek_v2
from transformers.models.deepseek_v3 import modeling_deepseek_v3

from mla_var3.layers import LatentCache, MlaAttention

SMALL: dict[str, Any] = {
    "hidden_size": 96, "num_attention_heads": 4, "num_key_value_heads": 4, "q_lora_rank": 48, "kv_lora_rank": 32,
    "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 12, "max_position_embeddings": 4096,
}  # fmt: skip
REAL: dict[str, Any] = {
    "hidden_size": 1024, "q_lora_rank": 512, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64,
    "v_head_dim": 128,
}  # fmt: skip
#: As DeepSeek V3 has it, and as V2 has it, whose two mscales are the same as well; the shorter context is reached here.
YARN: dict[str, Any] = {
    "rope_type": "yarn", "rope_theta": 10000.0, "factor": 40.0, "beta_fast": 32, "beta_slow": 1, "mscale": 0.707,
    "mscale_all_dim": 0.707, "original_max_position_embeddings": 102,
}  # fmt: skip


class KimiK2Config(PretrainedConfig):
    """The fields of the class that comes with Kimi K2's checkpoint, whose names of rope's fields are the older ones."""

    model_type = "kimi_k2"

    def __init__(self, rope_theta: float = 50000.0, rope_scaling: dict[str, Any] | None = None, **fields: Any) -> None:
        self.rope_theta = rope_theta
        self.rope_scaling = rope_scaling
        for name in SMALL:
            setattr(self, name, fields.pop(name))
        super().__init__(**fields)


def v3(**changes: Any) -> DeepseekV3Config:
    return DeepseekV3Config(**SMALL | changes)


def v2(**changes: Any) -> DeepseekV2Config:
    return DeepseekV2Config(**SMALL | changes)


def kimi(**changes: Any) -> KimiK2Config:
    scaling = {**YARN, "type": "yarn", "factor": 32.0, "beta_fast": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0}
    del scaling["rope_type"], scaling["rope_theta"]
    return KimiK2Config(rope_scaling=scaling, **SMALL | changes)


def original(config: PretrainedConfig, seed: int = 0) -> torch.nn.Module:
    """transformers' attention of a config with random weights that matter: logits have a spread of about 1, norms and
    biases are not those of a fresh module."""
    if isinstance(config, KimiK2Config):  # its checkpoint's module is DeepSeek's
        scaling = {**config.rope_parameters, "rope_theta": config.rope_theta}
        config = v3(**{name: getattr(config, name) for name in SMALL}, rope_parameters=scaling)
    config._attn_implementation = "eager"
    two = isinstance(config, DeepseekV2Config)
    module = modeling_deepseek_v2.DeepseekV2Attention if two else modeling_deepseek_v3.DeepseekV3Attention
    attention = module(config, layer_idx=0).requires_grad_(False)
    generator = torch.Generator().manual_seed(seed)
    for name, weight in attention.named_parameters():
        centre, spread = (
            (1.0, 0.2) if "layernorm" in name else (0.0, 0.2 if weight.dim() == 1 else weight.shape[1] ** -0.5)
        )
        weight.copy_(centre + spread * torch.randn(weight.shape, generator=generator))
    return attention


def run_original(attention: torch.nn.Module, hidden: torch.Tensor) -> torch.Tensor:
    """(tokens, hidden) of one request's tokens (tokens, hidden), each of which sees those up to itself: what a prefill
    and decode steps of any lengths give, in one run without a cache."""
    two = isinstance(attention.config, DeepseekV2Config)
    rotary = modeling_deepseek_v2.DeepseekV2RotaryEmbedding if two else modeling_deepseek_v3.DeepseekV3RotaryEmbedding
    tokens = len(hidden)
    mask = torch.full((tokens, tokens), float("-inf"), dtype=hidden.dtype, device=hidden.device).triu(1)
    embeddings = rotary(attention.config)(hidden, torch.arange(tokens, device=hidden.device)[None])
    return attention(hidden[None], attention_mask=mask[None, None], position_embeddings=embeddings)[0][0]


def ours(config: PretrainedConfig, attention: torch.nn.Module) -> MlaAttention:
    """Our layer with the weights, the dtype and the device of transformers' module."""
    weight = attention.o_proj.weight
    layer = MlaAttention(config, dtype=weight.dtype, device=weight.device)
    layer.load_state_dict(attention.state_dict())
    return layer


class OnKernels(MlaAttention):
    """Decodes as on a GPU, by the functions of `mla_var3.ops`, which the fixture `engine` lets compute on a CPU."""

    def _compute(self, hidden: Any, pages: Any, step: Any) -> Any:
        return self._by_kernels(hidden, pages, step) if step.decode else super()._compute(hidden, pages, step)


class Server:
    """Our layer serving requests whose hidden states are known, over a cache whose unused rows are NaN.

    hidden: (tokens, hidden) of each request, as they will come. outputs: what was computed for each so far.
    """

    def __init__(
        self, layer: MlaAttention, hidden: Mapping[str, torch.Tensor], num_pages: int, max_tokens: int
    ) -> None:
        given = next(iter(hidden.values()))
        self.layer, self.hidden = layer, hidden
        self.cache = LatentCache(
            1, num_pages, max_tokens, columns=layer.columns, dtype=given.dtype, device=given.device
        )
        self.cache.pages.fill_(float("nan"))
        self.numbers: dict[str, int] = {}
        self.outputs: dict[str, torch.Tensor] = {}

    def join(self, *names: str) -> None:
        for name in names:
            self.numbers[name] = self.cache.join()
            self.outputs[name] = self.hidden[name][:0]

    def leave(self, name: str) -> None:
        number = self.numbers.pop(name)
        held = self.cache._requests[number].pages
        self.cache.pages[:, held] = float("nan")
        self.cache.leave(number)

    def step(self, tokens: Mapping[str, int]) -> None:
        """Computes so many further tokens of each request."""
        done = {name: len(self.outputs[name]) for name in tokens}
        new = [self.hidden[name][done[name] : done[name] + count] for name, count in tokens.items()]
        step = self.cache.extend({self.numbers[name]: count for name, count in tokens.items()})
        out = self.layer(torch.cat(new), self.cache.pages[0], step)
        for name, part in zip(tokens, out.split(list(tokens.values())), strict=True):
            self.outputs[name] = torch.cat([self.outputs[name], part])


#: Every module of a layer whose query is compressed.
PARTS = ("q_a_proj", "q_a_layernorm", "q_b_proj", "kv_a_proj_with_mqa", "kv_a_layernorm", "kv_b_proj", "o_proj")


def numbers(module: torch.nn.Module, *shape: int) -> torch.Tensor:
    """The same in every dtype and on every device of a module's weight."""
    made = torch.randn(shape, generator=torch.Generator().manual_seed(7)) * shape[-1] ** -0.5
    return made.bfloat16().to(module.weight)


class Adapter(torch.nn.Module):
    """A module plus a product of low rank, as LoRA has it; what it adds is as large as what a projection gives."""

    def __init__(self, base: torch.nn.Module) -> None:
        super().__init__()
        self.base = base
        self.weight = base.weight  # as peft's layers have it
        self.a = torch.nn.Parameter(numbers(base, 4, base.weight.shape[-1]))
        self.b = torch.nn.Parameter(numbers(base, len(base.weight), 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + x @ self.a.T @ self.b.T


class Rolled(torch.nn.Module):
    """A parametrization."""

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight.roll(1, 0)


def _adapter(layer: torch.nn.Module, name: str) -> None:
    setattr(layer, name, Adapter(getattr(layer, name)))


def _hook(layer: torch.nn.Module, name: str) -> None:
    getattr(layer, name).register_forward_hook(lambda module, given, out: out + out.roll(1, -1))


def _pre_hook(layer: torch.nn.Module, name: str) -> None:
    getattr(layer, name).register_forward_pre_hook(lambda module, given: given[0] + given[0].roll(1, -1))


def _forward(layer: torch.nn.Module, name: str) -> None:
    module = getattr(layer, name)
    module.forward = lambda x: type(module).forward(module, x).roll(1, -1)


def _parametrization(layer: torch.nn.Module, name: str) -> None:
    parametrize.register_parametrization(getattr(layer, name), "weight", Rolled())


def _weight_norm(layer: torch.nn.Module, name: str) -> None:
    module = torch.nn.utils.parametrizations.weight_norm(getattr(layer, name))
    with torch.no_grad():
        module.parametrizations.weight.original0[::2] *= 2


def _older_weight_norm(layer: torch.nn.Module, name: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        module = torch.nn.utils.weight_norm(getattr(layer, name))
    with torch.no_grad():
        module.weight_g[::2] *= 2


def _bias(layer: torch.nn.Module, name: str) -> None:
    module = getattr(layer, name)
    module.bias = torch.nn.Parameter(numbers(module, len(module.weight)) * len(module.weight) ** 0.5)


def _other_weight(layer: torch.nn.Module, name: str) -> None:
    module = getattr(layer, name)
    module.weight = torch.nn.Parameter(module.weight.detach().roll(1, 0))


def _in_place(layer: torch.nn.Module, name: str) -> None:
    with torch.no_grad():
        weight = getattr(layer, name).weight
        weight.copy_(weight.roll(1, 0))


def _by_state_dict(layer: torch.nn.Module, name: str) -> None:
    weight = layer.state_dict()[f"{name}.weight"]
    weight.copy_(weight.roll(1, 0))


def _other_data(layer: torch.nn.Module, name: str) -> None:
    weight = getattr(layer, name).weight
    weight.data = weight.detach().roll(1, 0)


#: What changes a module of a layer, ours as well as transformers', so that outputs move.
CHANGES = {
    "adapter": _adapter, "hook": _hook, "pre-hook": _pre_hook, "forward": _forward,
    "parametrization": _parametrization, "weight_norm": _weight_norm, "older weight_norm": _older_weight_norm,
    "bias": _bias, "another weight": _other_weight, "in place": _in_place, "by the state dict": _by_state_dict,
    "other data": _other_data,
}  # fmt: skip
#: Modules and changes of them; norms have no bias.
CHANGED = [(name, change) for name in PARTS for change in CHANGES if not (change == "bias" and "norm" in name)]
#: How decode refuses those that it cannot count in `kv_b_proj`.
REFUSED = {
    "adapter": "kv_b_proj is of class Adapter: ", "hook": "kv_b_proj has a forward hook: ",
    "pre-hook": "kv_b_proj has a forward hook: ", "forward": "kv_b_proj has a forward of its own: ",
    "older weight_norm": "kv_b_proj has a forward hook: ", "bias": "kv_b_proj has a bias: ",
}  # fmt: skip


def prefill_and_decode(
    layer: MlaAttention, hidden: Sequence[torch.Tensor], prompts: Sequence[int], steps: int
) -> list[torch.Tensor]:
    """Outputs of a batch of requests: one step with all prompts, then `steps` with a token each."""
    names = [str(i) for i in range(len(hidden))]
    longest = max(prompts) + steps
    server = Server(layer, dict(zip(names, hidden, strict=True)), len(names) * -(-longest // 64), longest)
    server.join(*names)
    server.step(dict(zip(names, prompts, strict=True)))
    for _ in range(steps):
        server.step(dict.fromkeys(names, 1))
    return list(server.outputs.values())


def rounding_errors(
    config: PretrainedConfig, prompts: Sequence[int], steps: int, device: str
) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Of "prefill" and of "decode": errors of our layer in bf16, and of transformers' module in bf16, both against that
    module in fp32 with the same weights. Each is (tokens,): a token's root mean square over all columns, as a share of
    the reference's."""
    attention = original(config).to(device, torch.bfloat16)
    exact = copy.deepcopy(attention).float()
    generator = torch.Generator().manual_seed(1)
    hidden = [
        torch.randn(n + steps, config.hidden_size, generator=generator).to(device, torch.bfloat16) for n in prompts
    ]
    outputs = prefill_and_decode(ours(config, attention), hidden, prompts, steps)
    errors: dict[str, tuple[list[torch.Tensor], list[torch.Tensor]]] = {"prefill": ([], []), "decode": ([], [])}
    for out, x, prompt in zip(outputs, hidden, prompts, strict=True):
        reference = run_original(exact, x.float())
        for whose, values in enumerate((out, run_original(attention, x))):
            token = (values.float() - reference).square().mean(1).sqrt() / reference.square().mean(1).sqrt()
            errors["prefill"][whose].append(token[:prompt])
            errors["decode"][whose].append(token[prompt:])
    return {part: (torch.cat(mine), torch.cat(theirs)) for part, (mine, theirs) in errors.items()}


def assert_rounded_as_often(errors: Mapping[str, tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Our layer rounds as often as transformers' module, at other places: to the absorbed query and the latent output
    where that one rounds to each head's keys and values. So its errors are of the same size: 25 % is left over all
    tokens, 50 % for the worst one, which is drawn from a tail."""
    for part, (mine, theirs) in errors.items():
        assert mine.isfinite().all(), part
        assert mine.square().mean().sqrt() <= 1.25 * theirs.square().mean().sqrt(), part
        assert mine.max() <= 1.5 * theirs.max(), part
