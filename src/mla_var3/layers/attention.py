"""`MlaAttention`: the attention of DeepSeek V2 and V3 and of Kimi K2 over a paged latent cache.

    hidden (tokens, hidden) → q_a_proj → norm → q_b_proj → q: d columns without rope, p with
                            → kv_a_proj_with_mqa → latent → norm ┐
                                                 → rope → rotate ┴→ pages[slots]
    decode    absorbed:      [q · W_UK | q_rope] over the cached rows, then · W_UV; on a GPU by `rmsnorm`,
                             `absorb_gemm`, `rope_append` and `mla_decode` of `mla_var3.ops`
    prefill   decompressed:  [latent · W_UKᵀ | rope] and latent · W_UVᵀ of every head, then `mla_prefill`, for the
                             prompts and chunks of a step in one call; requests of few new tokens, which decode or
                             speculate beside them, are absorbed
    → o_proj → (tokens, hidden)

Both are the same function (DeepSeek-V2, arXiv 2405.04434, section 2.1). Absorbed attention reads each cached row once
for all heads, which decode wants; decompressed heads take about a third of its multiplications, which prefill wants.
`mla_var3.ops.chunk_prefill` says from how many new tokens of a request on.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.functional import linear, scaled_dot_product_attention

from mla_var3.errors import UserError
from mla_var3.kernel.chunks import up_project
from mla_var3.layers.cache import PAGE
from mla_var3.layers.checkpoint import judge_names, prepare
from mla_var3.layers.config import read_config
from mla_var3.layers.rope import Rope, softmax_scale
from mla_var3.ops import absorb_gemm, mla_decode, rmsnorm, rope_append
from mla_var3.ops.chunk_prefill import Project, absorbed, by_product, decompressed, way_of
from mla_var3.ops.prefill import require_no_gradient

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from mla_var3.layers.cache import Step

#: Both down-projections, in the order in which their columns lie where one product computes them.
DOWN = ("q_a_proj", "kv_a_proj_with_mqa")
#: Classes of a weight whose memory is the weight, which kernels read; None where it is computed from other parameters.
PLAIN = (nn.Parameter, torch.Tensor, type(None))
#: transformers' modules and DeepSeek's have this whatever `rms_norm_eps` of the config is.
NORM_EPS = 1e-6


class MlaAttention(nn.Module):
    """One layer, built from a model's Hugging Face config, whose parameters have the names of transformers'
    `DeepseekV3Attention` and `DeepseekV2Attention`, so that it loads their state dicts; those of checkpoints in blocks
    of 8 bits (`weight_scale_inv`) are dequantised while they are loaded. For inference: no gradients.

    `LatentCache` and `Step` say where tokens lie. `columns` is the width that the cache needs.

    What is put around a projection or a norm counts in every step, because the layer calls it: an adapter (LoRA), a
    forward hook, a parametrization, a replaced weight. `kv_b_proj` alone is not called by decode, which multiplies by
    its weight from both sides; so decode refuses whatever a call of it would add to the product with its weight. Hooks
    for all modules at once (`register_module_forward_hook`), which torch means for debugging and profiling, see what is
    called. One dtype is computed in, that of hidden states, weights and cache, also under autocast.
    """

    def __init__(
        self, config: Any, *, dtype: torch.dtype | None = None, device: torch.device | str | None = None
    ) -> None:
        """config: transformers' DeepseekV3Config, DeepseekV2Config, or Kimi K2's. Raises `UserError` for others."""
        super().__init__()
        self.shape = shape = read_config(config)
        self.rope = Rope(shape)
        self.scale = softmax_scale(shape)
        self.columns = shape.k + shape.p
        place: dict[str, Any] = {"dtype": dtype, "device": device}
        queries = shape.h * (shape.d + shape.p)
        if shape.q_rank is None:
            self.q_proj = nn.Linear(shape.hidden, queries, bias=False, **place)
        else:
            self.q_a_proj = nn.Linear(shape.hidden, shape.q_rank, bias=shape.bias, **place)
            self.q_a_layernorm = nn.RMSNorm(shape.q_rank, NORM_EPS, **place)
            self.q_b_proj = nn.Linear(shape.q_rank, queries, bias=False, **place)
        self.kv_a_proj_with_mqa = nn.Linear(shape.hidden, self.columns, bias=shape.bias, **place)
        self.kv_a_layernorm = nn.RMSNorm(shape.k, NORM_EPS, **place)
        self.kv_b_proj = nn.Linear(shape.k, shape.h * (shape.d + shape.v), bias=False, **place)
        self.o_proj = nn.Linear(shape.h * shape.v, shape.hidden, bias=shape.bias, **place)
        self._own = {name: (type(part).forward, part.weight.shape) for name, part in self.named_children()}
        self._join()
        self.register_load_state_dict_pre_hook(_prepare)

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """torch's, which raises `UserError` in one sentence where names or shapes do not fit. As a part of a larger
        module the layer is loaded by that module's; weights of 8 bits are dequantised, and what
        `mla_var3.layers.checkpoint` refuses is refused, then as well."""
        if strict:
            judge_names(state_dict, self.state_dict())
        return super().load_state_dict(state_dict, strict, assign)

    def _join(self) -> None:
        """Moves the weights of both down-projections behind one another, so that one product computes both. Only where
        they have just been made: later a caller may hold other tensors of the same memory, as those of a state dict
        are, or a graph its address. Weights that are assigned or replaced stay where they are, and take two products.
        """
        for name in ("weight", "bias"):
            pair = self._pair(name)
            if pair is None or behind(pair) is not None:
                continue
            with torch.inference_mode(False), torch.no_grad():  # whoever trains these weights later can
                together = torch.cat([part.detach() for part in pair])
                places = together.split([len(part) for part in pair])
                for owner, part, place in zip(DOWN, pair, places, strict=True):
                    if part.is_inference():  # whose data cannot be replaced
                        self._modules[owner]._parameters[name] = nn.Parameter(place, part.requires_grad)
                    else:
                        part.data = place

    def _pair(self, name: str) -> list[torch.Tensor] | None:
        """A parameter of both down-projections, where they are such that one product can compute both."""
        parts = [self._modules.get(part) for part in DOWN]
        pair = [None if part is None else part._parameters.get(name) for part in parts]
        first, second = pair
        if first is None or second is None or not all(type(part) is nn.Parameter for part in pair):
            return None
        same = (first.dtype, first.device, first.shape[1:]) == (second.dtype, second.device, second.shape[1:])
        return [first, second] if same else None

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        """torch's, by which a module is moved and converted."""
        pair = self._pair("weight")
        joined = pair is not None and behind(pair) is not None
        made = super()._apply(fn, recurse)
        if joined:
            self._join()
        return made

    def __setstate__(self, state: Any) -> None:
        super().__setstate__(state)
        self._join()  # copy.deepcopy has made tensors one by one

    def forward(self, hidden: torch.Tensor, pages: torch.Tensor, step: Step) -> torch.Tensor:
        """Writes the new tokens of a step into the cache, and attends from each to its request's tokens up to itself.

        hidden: (tokens, hidden), the requests' new tokens one behind another. pages: (num_pages, 64, columns), this
        layer's part of `LatentCache.pages`, in hidden's dtype, which is the weights'. Returns (tokens, hidden).

        Where every request has one new token, a GPU computes attention and what stands around it by the functions of
        `mla_var3.ops` (bf16, fp16), and projections by their modules; where values have another width than keys, torch
        computes all but `mla_decode`. Only such steps can be captured in a CUDA graph, after one of them has run
        uncaptured: replays read what then lies in hidden, in the step's tensors and in the weights of the capture. A
        CPU computes by torch.

        In any other step all tokens of a request are decompressed into keys and values, piece by piece, and its new
        tokens attend to these as in a prompt. On a GPU a request of few new tokens behind cached ones attends to the
        cache itself instead, with absorbed queries, if that is less work for so many new tokens, values are as wide as
        keys, and `kv_b_proj` is no more than the product with its weight. A step with a prompt computes all of its
        requests in these ways: give prompts steps of their own.

        Raises `UserError` in one sentence for what does not fit, a gradient that hidden requires, and, where every
        request has one new token, a `kv_b_proj` that is more than the product with its weight.
        """
        self._judge(hidden, pages, step)
        with torch.no_grad():
            if hidden.is_meta or not torch.is_autocast_enabled(hidden.device.type):
                return self._compute(hidden, pages, step)
            # It would give products of another dtype than the cache has, and decode's kernels know nothing of it.
            with torch.autocast(hidden.device.type, enabled=False):
                return self._compute(hidden, pages, step)

    def _compute(self, hidden: torch.Tensor, pages: torch.Tensor, step: Step) -> torch.Tensor:
        shape, tokens = self.shape, len(step.positions)
        if step.decode and hidden.is_cuda and shape.d == shape.v:
            return self._by_kernels(hidden, pages, step)
        angles = self.rope.angles(step.positions)
        if shape.q_rank is None:
            q = self._call("q_proj", hidden)
        else:
            q = self._call("q_b_proj", self._call("q_a_layernorm", self._call("q_a_proj", hidden)))
        q_nope, q_rope = q.view(tokens, shape.h, -1).split([shape.d, shape.p], -1)
        q_rope = self.rope.rotate(q_rope, angles)
        latent, rope = self._call("kv_a_proj_with_mqa", hidden).split([shape.k, shape.p], -1)
        rotated = self.rope.rotate(rope[:, None], angles)[:, 0]
        rows = torch.cat([self._call("kv_a_layernorm", latent), rotated], -1)
        pages.view(-1, self.columns).index_copy_(0, step.slots, rows)
        if step.decode:
            return self._call("o_proj", self._absorbed(q_nope, q_rope, pages, step).flatten(1))
        return self._call("o_proj", self._prompts(torch.cat([q_nope, q_rope], -1), pages, step).flatten(1))

    def _by_kernels(self, hidden: torch.Tensor, pages: torch.Tensor, step: Step) -> torch.Tensor:
        """A decode step without a copy: each kernel writes its columns of what the next one reads."""
        shape, kv_b = self.shape, self.kv_b_proj.weight
        if max(step.lengths) > shape.max_positions:
            raise UserError(
                f"a request has {max(step.lengths)} tokens: the model of this config is made for {shape.max_positions}."
            )
        if shape.q_rank is None:
            latents = self._call("kv_a_proj_with_mqa", hidden)
            (latent,) = self._normed(latents[:, : shape.k], ("kv_a_layernorm",))
            q = self._call("q_proj", hidden)
        else:
            latents = self._down(hidden)
            query, latent = self._normed(latents[:, : shape.q_rank + shape.k], ("q_a_layernorm", "kv_a_layernorm"))
            q = self._call("q_b_proj", query)
        q = q.view(len(hidden), shape.h, shape.d + shape.p)
        queries = q.new_empty((len(hidden), shape.h, self.columns))
        absorb_gemm(q[..., : shape.d], kv_b, "q", out=queries[..., : shape.k])
        rope_append(
            q, latent, latents[:, -shape.p :], step.positions, step.slots, self.rope.table(hidden.device), queries,
            pages, interleaved=shape.interleaved,
        )  # fmt: skip
        attended = mla_decode(
            queries[:, None], pages, step.page_table, step.seq_lens, scale=self.scale, head_dim_v=shape.k
        )
        assert isinstance(attended, torch.Tensor)
        return self._call("o_proj", absorb_gemm(attended[:, 0], kv_b, "out").flatten(1))

    def _judge(self, hidden: torch.Tensor, pages: torch.Tensor, step: Step) -> None:
        """In every step, since whatever is judged here can be changed between two of them."""
        shape, tokens = self.shape, len(step.positions)
        if tuple(hidden.shape) != (tokens, shape.hidden):
            raise UserError(
                f"hidden is {tuple(hidden.shape)} and the step has {tokens} tokens of {shape.hidden} columns."
            )
        require_no_gradient(hidden=hidden)
        modules, dtype = self._modules, hidden.dtype
        for name, (forward, wanted) in self._own.items():
            part = modules.get(name)
            if part is None:
                raise UserError(f"{name} is no module of the layer any more: every step needs it, so put it back.")
            if type(part).forward is not forward:
                continue  # an adapter, whose own dtypes and shapes are its business
            weight = part._parameters.get("weight")
            if weight is None:
                # A class has it that computes it, and an instance where torch's older weight_norm puts it there.
                if not hasattr(type(part), "weight") and part.__dict__.get("weight") is None:
                    raise UserError(f"{name} has no weight any more: every step reads it, so load it again or keep it.")
            elif weight.dtype is not dtype:
                raise UserError(
                    f"hidden is {dtype} and {name}.weight is {weight.dtype}: the layer computes in one dtype, "
                    "so convert hidden, or the layer by layer.to(dtype) and its cache with it."
                )
            elif weight.shape != wanted:
                raise UserError(f"{name}.weight is {tuple(weight.shape)}: this config's layer has {tuple(wanted)}.")
        if tuple(pages.shape[1:]) != (PAGE, self.columns) or pages.dtype != hidden.dtype:
            needed = f"(num_pages, {PAGE}, {self.columns}) in hidden's {hidden.dtype}"
            raise UserError(f"pages are {tuple(pages.shape)} {pages.dtype}: this layer needs {needed}.")
        if step.decode:
            kv_b = self._modules["kv_b_proj"]
            more = added(kv_b) or ("has a bias" if kv_b.bias is not None else None)
            weight = kv_b._parameters.get("weight")
            if more is None and type(weight) not in PLAIN and not torch.compiler.is_compiling():
                more = f"has a weight of class {type(weight).__name__}"
            if more is not None:
                raise UserError(
                    f"kv_b_proj {more}: decode multiplies by its weight and never calls it, so merge what it computes "
                    "into the weight of a plain nn.Linear, or take it away."
                )

    def _call(self, name: str, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self._modules[name](x)
        if out.dtype is not x.dtype:
            raise UserError(
                f"{name} gives {out.dtype} for {x.dtype}: the layer computes in one dtype, so let what was put there "
                "convert its result."
            )
        return out

    def _down(self, hidden: torch.Tensor) -> torch.Tensor:
        """(tokens, q_rank + k + p): both down-projections, as one product where they are no more than that and their
        weights lie behind one another."""
        parts = [self._modules[name] for name in DOWN]
        # A compiler knows no addresses.
        if not torch.compiler.is_compiling() and not any(map(added, parts)):
            biases = [part.bias for part in parts]
            weight, bias = behind([part.weight for part in parts]), behind(biases)
            if weight is not None and (bias is not None or not any(one is not None for one in biases)):
                return linear(hidden, weight, bias)
        return torch.cat([self._call(name, hidden) for name in DOWN], 1)

    def _normed(self, x: torch.Tensor, names: Sequence[str]) -> tuple[torch.Tensor, ...]:
        """x by one norm, or its first columns by one and the others by another, by a kernel where they are no more than
        norms."""
        norms = [self._modules[name] for name in names]
        if not any(added(norm) or norm.eps != NORM_EPS for norm in norms):
            second = norms[1].weight if len(norms) > 1 else None
            made = rmsnorm(x, norms[0].weight, eps=NORM_EPS, second_weight=second)
            return made if isinstance(made, tuple) else (made,)
        widths = [self._own[name][1][0] for name in names]
        return tuple(self._call(name, part).contiguous() for name, part in zip(names, x.split(widths, 1), strict=True))

    def _absorbed(self, q_nope: torch.Tensor, q_rope: torch.Tensor, pages: torch.Tensor, step: Step) -> torch.Tensor:
        """(b, h, v) of one token (b, h, d), (b, h, p) of each request."""
        w_uk, w_uv = self.kv_b_proj.weight.reshape(self.shape.h, -1, self.shape.k).split(
            [self.shape.d, self.shape.v], 1
        )
        q = torch.cat([torch.einsum("bhd,hdk->bhk", q_nope, w_uk), q_rope], -1)
        if q.is_cuda:  # values of another width than keys: no kernel has the product with W_UV
            table, k = step.page_table, self.shape.k
            decoded = mla_decode(q[:, None], pages, table, step.seq_lens, scale=self.scale, head_dim_v=k)
            assert isinstance(decoded, torch.Tensor)
            out = decoded[:, 0]
        else:
            out = decode_on_cpu(q, pages, step, self.shape.k, self.scale)
        return torch.einsum("bhk,hvk->bhv", out, w_uv)

    def _prompts(self, q: torch.Tensor, pages: torch.Tensor, step: Step) -> torch.Tensor:
        """(tokens, h, v) of new tokens (tokens, h, d + p), of some requests many."""
        few, many = self._by_way(q, step)
        if not few:
            return self._decompressed(q, pages, step)
        if not many:
            return self._absorbed_chunks(q, pages, step)
        out = q.new_empty((len(q), self.shape.h, self.shape.v))
        for requests, attend in ((few, self._absorbed_chunks), (many, self._decompressed)):
            part, places = step.only(requests)
            out[places] = attend(q[places], pages, part)
        return out

    def _by_way(self, q: torch.Tensor, step: Step) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Requests that are absorbed, and those that are decompressed. Absorbed are on a GPU those of few new tokens
        behind a prefix, where `kv_b_proj` is its weight's product."""
        shape, kv_b = self.shape, self.kv_b_proj
        takes = q.is_cuda and q.dtype in (torch.bfloat16, torch.float16) and shape.d == shape.v
        if not takes or not self._is_its_product(kv_b):
            return (), tuple(range(len(step.counts)))
        groups: tuple[list[int], list[int]] = ([], [])
        for i, (count, length) in enumerate(zip(step.counts, step.lengths, strict=True)):
            absorbs = length > count and way_of(count, shape.k, shape.d, shape.p, shape.v) == "absorb"
            groups[not absorbs].append(i)
        return tuple(groups[0]), tuple(groups[1])

    def _absorbed_chunks(self, q: torch.Tensor, pages: torch.Tensor, step: Step) -> torch.Tensor:
        weight, lens = self.kv_b_proj.weight.detach(), step.seq_lens
        return absorbed(q, pages, step.page_table, lens, step.offsets, weight, self.scale)[0]

    def _decompressed(self, q: torch.Tensor, pages: torch.Tensor, step: Step) -> torch.Tensor:
        kv_b, shape = self.kv_b_proj, self.shape
        if self._is_its_product(kv_b):
            project: Project = functools.partial(up_project, kv_b.weight.detach())
        else:
            project = by_product(lambda latents: self._call("kv_b_proj", latents))
        return decompressed(
            q, pages, step.page_table, step.seq_lens, step.offsets, project, shape.k, shape.v, step.prefix_tokens,
            self.scale,
        )[0]  # fmt: skip

    @staticmethod
    def _is_its_product(kv_b: nn.Module) -> bool:
        """Whether calling `kv_b_proj` is the product with its weight, and no more."""
        plain = type(kv_b._parameters.get("weight")) in PLAIN
        return plain and added(kv_b) is None and kv_b.bias is None


def added(module: nn.Module) -> str | None:
    """What calling a projection or a norm does beside computing with its weight and bias, as the end of a sentence;
    None where that is all. A class that changes nothing but where the weight comes from, as a parametrization's does,
    adds nothing."""
    if type(module).forward not in (nn.Linear.forward, nn.RMSNorm.forward):
        return f"is of class {type(module).__name__}"
    if "forward" in module.__dict__:
        return "has a forward of its own"
    if module._forward_hooks or module._forward_pre_hooks:
        return "has a forward hook"
    return None


def behind(parts: Sequence[torch.Tensor | None]) -> torch.Tensor | None:
    """All rows of these tensors, (rows, ...), as a view of one where they lie behind one another in one memory, else
    None."""
    first = parts[0]
    if first is None:
        return None
    end, rows, memory = first.storage_offset(), 0, first.untyped_storage().data_ptr()
    for part in parts:
        if part is None or type(part) is not nn.Parameter or not part.is_contiguous() or part.dtype is not first.dtype:
            return None
        if part.storage_offset() != end or part.untyped_storage().data_ptr() != memory:
            return None
        end, rows = end + part.numel(), rows + len(part)
    return first.detach().as_strided((rows, *first.shape[1:]), first.stride())


def cached_rows(pages: torch.Tensor, step: Step, request: int) -> torch.Tensor:
    """(length, columns): the cached tokens of a step's request, in order."""
    length = step.lengths[request]
    return pages[step.page_table[request, : -(-length // PAGE)]].flatten(0, 1)[:length]


def decode_on_cpu(q: torch.Tensor, pages: torch.Tensor, step: Step, k: int, scale: float) -> torch.Tensor:
    """(b, h, k): what `mla_decode` computes of q (b, h, k + p), in torch; a request's heads are rows over one key."""
    out = []
    for i, heads in enumerate(q):
        rows = cached_rows(pages, step, i)
        out.append(scaled_dot_product_attention(heads[None], rows[None], rows[None, :, :k], scale=scale)[0])
    return torch.stack(out)


def _prepare(module: MlaAttention, state: Any, prefix: str, *_others: Any) -> None:
    prepare(state, prefix, dict(module.named_parameters()))
