#!/usr/bin/env python3
"""Serves a DeepSeek-V3 of transformers with `mla_var3.layers.MlaAttention` in place of its attention.

    python examples/serve_deepseek.py                      # a GPU where there is one, else a CPU
    python examples/serve_deepseek.py --requests 32 --prompt 4000 --heads 128

The model is small and randomly initialised, with DeepSeek's widths of a head: latent 512, rope 64, 128 columns. Both
sides generate greedily for the same prompts. Ours are of different lengths in one batch: requests lie in a paged latent
cache, prompts are computed in one step and then a token of each request in every step. The original has its own cache
and its prompts padded on the left.

Checked: in float32 (CPU) all tokens are the original's. In bf16 (GPU) rounding may decide between two tokens, so our
logits are compared with the original's in float32 on the same tokens: their error, the median over a request's tokens,
may be half as large again as that of the original in bf16. Exits with 1 where a check fails.

Needs the extra layers, which brings transformers, and on a GPU the extra cute: `pip install -e '.[layers,cute]'` in a
checkout.
"""

from __future__ import annotations

import argparse
import copy
import inspect
import sys
import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, DeepseekV3Config, DynamicCache, PreTrainedModel

from mla_var3.layers import LatentCache, MlaAttention, Step


def now() -> float:
    """Seconds, when all that was asked of the device is done."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


class Attention(nn.Module):
    """`MlaAttention` where a decoder layer of transformers expects its own: what it is called with besides the hidden
    states says less than the step does."""

    def __init__(self, config: Any, original: nn.Module) -> None:
        super().__init__()
        weight = next(original.parameters())
        self.layer = MlaAttention(config, dtype=weight.dtype, device=weight.device)
        self.layer.load_state_dict(original.state_dict())
        self.pages: torch.Tensor
        self.step: Step

    def forward(self, hidden_states: torch.Tensor, **_: Any) -> tuple[torch.Tensor, None]:
        return self.layer(hidden_states[0], self.pages, self.step)[None], None


class Server:
    """A model of transformers with our attention, and the cache that its requests share."""

    def __init__(self, original: PreTrainedModel, num_pages: int, max_tokens: int) -> None:
        self.model = copy.deepcopy(original)
        self.attention = [Attention(original.config, layer.self_attn) for layer in original.model.layers]
        columns = self.attention[0].layer.columns
        place: dict[str, Any] = {"dtype": original.dtype, "device": original.device}
        self.cache = LatentCache(len(self.attention), num_pages, max_tokens, columns=columns, **place)
        for layer, attention, pages in zip(self.model.model.layers, self.attention, self.cache.pages, strict=True):
            layer.self_attn, attention.pages = attention, pages

    def step(self, ids: torch.Tensor, tokens: dict[int, int]) -> torch.Tensor:
        """Logits (requests, vocabulary) behind each request's last token. ids: (tokens,), those of the requests one
        behind another; tokens: how many each has."""
        step = self.cache.extend(tokens)
        for attention in self.attention:
            attention.step = step
        hidden = self.model.model.embed_tokens(ids[None])
        for layer in self.model.model.layers:
            hidden = layer(hidden)
        ends = torch.tensor(step.counts, device=ids.device).cumsum(0) - 1
        return self.model.lm_head(self.model.model.norm(hidden[0, ends]))

    def generate(self, prompts: Sequence[torch.Tensor], count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """So many tokens behind each prompt, (requests, count), and the logits that they were taken from.
        `prompt_seconds` is the time of the first step, which computes the prompts, `seconds` that of the others."""
        requests = [self.cache.join() for _ in prompts]
        chosen: list[torch.Tensor] = []
        start = now()
        logits = [self.step(torch.cat(list(prompts)), dict(zip(requests, map(len, prompts), strict=True)))]
        chosen.append(logits[-1].argmax(-1))
        begin = now()
        self.prompt_seconds = begin - start
        while len(chosen) < count:
            logits.append(self.step(chosen[-1], dict.fromkeys(requests, 1)))
            chosen.append(logits[-1].argmax(-1))
        self.seconds = now() - begin
        for request in requests:
            self.cache.leave(request)
        return torch.stack(chosen, 1), torch.stack(logits, 1)


class Original:
    """The model as transformers runs it, in the same loop: prompts padded on the left, and the cache that it makes."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        # transformers is renaming the argument.
        self.argument = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
        self.cache: DynamicCache

    def generate(self, prompts: Sequence[torch.Tensor], count: int) -> torch.Tensor:
        """So many tokens behind each prompt, (requests, count). `prompt_seconds`, `seconds`: as in `Server`."""
        start = now()
        longest = max(map(len, prompts))
        ids = torch.stack([nn.functional.pad(prompt, (longest - len(prompt), 0)) for prompt in prompts])
        lengths = torch.tensor([len(prompt) for prompt in prompts], device=ids.device)[:, None]
        mask = (torch.arange(longest + count, device=ids.device) >= longest - lengths).long()
        positions = (mask.cumsum(-1) - 1).clamp(min=0)
        self.cache = DynamicCache(config=self.model.config)
        chosen: list[torch.Tensor] = []
        begin, end, started = 0, longest, 0.0
        while len(chosen) < count:
            made = self.model(
                ids, attention_mask=mask[:, :end], position_ids=positions[:, begin:end], use_cache=True,
                logits_to_keep=1, **{self.argument: self.cache},
            )  # fmt: skip
            chosen.append(made.logits[:, -1].argmax(-1))
            ids, begin, end = chosen[-1][:, None], end, end + 1
            started = started or now()
        self.prompt_seconds, self.seconds = started - start, now() - started
        return torch.stack(chosen, 1)

    def cached(self) -> int:
        """Elements that the cache holds for a token of one layer."""
        layer = self.cache.layers[0]
        requests, _, tokens, _ = layer.keys.shape
        return (layer.keys.numel() + layer.values.numel()) // (requests * tokens)


def follow(model: PreTrainedModel, prompts: Sequence[torch.Tensor], tokens: torch.Tensor) -> torch.Tensor:
    """The original's logits (requests, count, vocabulary) where it reads these tokens behind the prompts, each request
    alone and at once."""
    rows = []
    for prompt, row in zip(prompts, tokens, strict=True):
        ids = torch.cat([prompt, row[:-1]])[None]
        rows.append(model(ids, use_cache=False).logits[0, len(prompt) - 1 :].float())
    return torch.stack(rows)


def rates(side: Server | Original, prompts: Sequence[torch.Tensor], count: int) -> tuple[float, float]:
    """Seconds of the step that computes the prompts, and tokens a second of those behind it: each the best of three
    runs after one that is not counted."""
    runs = []
    for _ in range(4):
        side.generate(prompts, count)
        runs.append((side.prompt_seconds, side.seconds))
    prompt, decode = map(min, zip(*runs[1:], strict=True))
    return prompt, len(prompts) * (count - 1) / decode


def check(model: PreTrainedModel, prompts: Sequence[torch.Tensor], served: Any, tokens: torch.Tensor) -> bool:
    """Whether what was served, (tokens, logits), is the model's, and says how far from it. tokens: the model's own."""
    ours, logits = served
    same = int((ours == tokens).sum())
    print(f"tokens equal to the original's: {same} of {tokens.numel()}")
    if model.dtype == torch.float32:
        return same == tokens.numel()
    exact = follow(copy.deepcopy(model).float(), prompts, ours)
    # A rounded router sends a token to another expert now and then, ours and theirs: the median leaves that out.
    mine, theirs = (
        (x.float() - exact).square().mean(-1).sqrt().median(-1).values for x in (logits, follow(model, prompts, ours))
    )
    ratios = mine / theirs
    print(
        f"error of the logits against float32: {ratios.min():.2f} to {ratios.max():.2f} of the original's, by request"
    )
    return bool((ratios <= 1.5).all())


@torch.no_grad()
def serve(
    config: DeepseekV3Config, lengths: Sequence[int], count: int, device: torch.device, dtype: torch.dtype
) -> bool:
    """Generates so many tokens behind prompts of these lengths with both, prints what came out, and checks it."""
    torch.manual_seed(0)
    # Not `.to(dtype)`, which would round the frequencies of rope in transformers' buffers.
    model = AutoModelForCausalLM.from_config(config, dtype=dtype).eval().to(device)
    prompts = [torch.randint(config.vocab_size, (length,), device=device) for length in lengths]
    longest = max(lengths) + count
    server, original = Server(model, len(prompts) * -(-longest // 64), longest), Original(model)
    passed = check(model, prompts, server.generate(prompts, count), original.generate(prompts, count))

    (our_prompts, ours), (their_prompts, theirs) = (rates(side, prompts, count) for side in (server, original))
    latent, held = config.kv_lora_rank + config.qk_rope_head_dim, original.cached()
    kind = "the latent, decompressed into K and V in every step" if held == latent else "decompressed K and V"
    print(f"{len(prompts)} requests of {min(lengths)} to {max(lengths)} tokens, {count} generated, {dtype} on {device}")
    print(
        f"prompts, {sum(lengths)} tokens in all: ours {1e3 * our_prompts:.1f} ms, "
        f"transformers {1e3 * their_prompts:.1f} ms"
    )
    print(f"ours:         {ours:8.1f} tokens a second; a token's cache in a layer: {latent} elements")
    print(f"transformers: {theirs:8.1f} tokens a second; a token's cache in a layer: {held} elements, {kind}")
    return passed


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="A small random DeepSeek-V3 of transformers with our attention.")
    for name, default, what in (
        ("requests", 4, "requests served at once"),
        ("prompt", 200, "tokens of the longest prompt"),
        ("tokens", 32, "tokens to generate for each request"),
        ("layers", 3, "layers of the model, the first without experts"),
        ("heads", 8, "heads of attention"),
        ("hidden", 512, "columns of a hidden state"),
    ):
        parser.add_argument(f"--{name}", type=int, default=default, help=f"{what} (default: {default})")
    given = parser.parse_args(arguments)
    if min(vars(given).values()) < 1 or given.tokens < 2:
        parser.error("give at least 2 tokens to generate, and at least 1 of the rest")
    config = DeepseekV3Config(
        vocab_size=4096, hidden_size=given.hidden, intermediate_size=2 * given.hidden, q_lora_rank=given.hidden // 2,
        num_hidden_layers=given.layers, num_attention_heads=given.heads, num_key_value_heads=given.heads,
        moe_intermediate_size=given.hidden, n_routed_experts=8, num_experts_per_tok=2, n_group=1, topk_group=1,
        first_k_dense_replace=1, num_mtp_layers=0, max_position_embeddings=163840,
        rope_parameters={
            "rope_type": "yarn", "rope_theta": 10000.0, "factor": 40.0, "beta_fast": 32, "beta_slow": 1, "mscale": 1.0,
            "mscale_all_dim": 1.0, "original_max_position_embeddings": 4096,
        },
    )  # fmt: skip
    lengths = [given.prompt - 37 * i % given.prompt for i in range(given.requests)]
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    if serve(config, lengths, given.tokens, device, dtype):
        return 0
    print("wrong: this is not what the original computes", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
