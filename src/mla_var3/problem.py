"""The work, without tensors or tilings: `MlaProblem`, its geometries, and what it costs at least.

Words: b requests of s query tokens each attend to t cached tokens each (or a list of lengths). h query heads share
h_kv latent caches (1 in MLA). A cached token is a latent of k columns and a rope part of p columns; decompressed,
it is per head a key of d + p and a value of d columns. The newest n tokens of each request may be cached
decompressed (`mla_var6_plus`); n = 0 is the absorbed form.
"""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mla_var3.errors import UserError, nearest

DTYPE_BYTES = {"bf16": 2, "fp16": 2, "fp32": 4}
_TORCH_DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
LENGTH_NAMES = ("uniform", "ragged", "normal", "edges")
FORMULATIONS = ("absorbed", "decompressed", "mixed")

# Query heads and head dims of public models: config.json of deepseek-ai/DeepSeek-V3, deepseek-ai/DeepSeek-V2-Lite
# and moonshotai/Kimi-K2-Instruct (num_attention_heads, kv_lora_rank, qk_rope_head_dim, v_head_dim).
GEOMETRIES: dict[str, dict[str, int]] = {
    "deepseek-v3": {"h": 128, "h_kv": 1, "k": 512, "p": 64, "d": 128},
    "deepseek-v2-lite": {"h": 16, "h_kv": 1, "k": 512, "p": 64, "d": 128},
    "kimi-k2": {"h": 64, "h_kv": 1, "k": 512, "p": 64, "d": 128},
}


@dataclass(frozen=True)
class ProblemClass:
    """What a compiled kernel is specialised on: everything of a problem but b, t and the lengths."""

    s: int
    h: int
    h_kv: int
    k: int
    p: int
    d: int
    n: int
    causal: bool
    page: int | None
    dtype: str

    def key(self) -> str:
        """A short file-name-safe string, equal exactly for equal classes."""
        page = "contig" if self.page is None else f"pg{self.page}"
        mask = "causal" if self.causal else "full"
        return f"s{self.s}_h{self.h}_kv{self.h_kv}_k{self.k}_p{self.p}_d{self.d}_n{self.n}_{mask}_{page}_{self.dtype}"


@dataclass(frozen=True)
class Cost:
    """The least work and traffic of a formulation.

    flops: floating-point operations of the attention's two matrix products (a multiply-add is 2).
    bytes: device memory traffic when every input is read once and every output written once.
    pairs: (query token, cached token) pairs that attend, over all requests, for one head.
    """

    flops: int
    bytes: int
    pairs: int

    @property
    def intensity(self) -> float:
        """FLOPs per byte; infinite when nothing moves."""
        return self.flops / self.bytes if self.bytes else math.inf


@dataclass(frozen=True)
class MlaProblem:
    """One attention problem. Raises `UserError`, naming the field, when it makes no sense.

    b: requests. s: query tokens of each request. t: cached tokens of each request, the s new ones included, or a
    sequence of b lengths. h: query heads. h_kv: latent caches, each shared by h / h_kv heads. k: latent columns.
    p: rope columns. d: head dim. n: newest tokens cached decompressed. causal: query token i attends to the first
    length - s + i + 1 tokens. page: tokens a cache page, or None for a contiguous cache. dtype: bf16, fp16 or fp32.
    lengths: "uniform" (all t), a mapping {"name": "ragged" | "normal" | "edges", "seed": int}, or a list.
    softmax_scale: factor on q·k, None for that of the decompressed heads, (d + p)^-1/2; compiled code does not depend
    on it.
    """

    b: int = 1
    s: int = 1
    t: int = 4096
    h: int = 128
    h_kv: int = 1
    k: int = 512
    p: int = 64
    d: int = 128
    n: int = 0
    causal: bool = False
    page: int | None = 64
    dtype: str = "bf16"
    lengths: Any = "uniform"
    softmax_scale: float | None = None

    def __post_init__(self) -> None:
        t: Any = self.t
        if isinstance(t, Sequence) and not isinstance(t, str):
            object.__setattr__(self, "lengths", tuple(t))
            object.__setattr__(self, "b", len(t))
            object.__setattr__(self, "t", max((int(x) for x in t), default=0))
        self._freeze_lengths()
        for name in ("b", "s", "h", "h_kv", "k", "d"):
            self._want(name, getattr(self, name), 1)
        for name in ("t", "p", "n"):
            self._want(name, getattr(self, name), 0)
        if self.h % self.h_kv:
            raise UserError(f"problem.h = {self.h} is not a multiple of h_kv = {self.h_kv}: choose one that is.")
        if self.page is not None:
            self._want("page", self.page, 1)
        if self.dtype not in DTYPE_BYTES:
            raise UserError(f"problem.dtype = {self.dtype!r} is unknown: {nearest(str(self.dtype), DTYPE_BYTES)}.")
        if self.n > self.t:
            raise UserError(f"problem.n = {self.n} decompressed tokens do not fit in t = {self.t}: use n <= t.")
        if not isinstance(self.causal, bool):
            raise UserError(f"problem.causal = {self.causal!r} is not a boolean: use true or false.")

    def _want(self, name: str, value: Any, low: int) -> None:
        if isinstance(value, bool) or not isinstance(value, int):
            raise UserError(f"problem.{name} = {value!r} is not an integer: use a whole number of at least {low}.")
        if value < low:
            raise UserError(f"problem.{name} = {value} is too small: use at least {low}.")

    def _freeze_lengths(self) -> None:
        """Brings `lengths` into one of its hashable forms: a name, (("name", x), ("seed", y)), or a tuple of ints."""
        value = self.lengths
        if isinstance(value, str):
            value = {"name": value, "seed": 0} if value != "uniform" else value
        if isinstance(value, Mapping):
            unknown = set(value) - {"name", "seed"}
            if unknown or "name" not in value:
                raise UserError(f"problem.lengths = {dict(value)!r} needs the fields name and seed, and no others.")
            name, seed = str(value["name"]), int(value.get("seed", 0))
            if name not in LENGTH_NAMES:
                raise UserError(f"problem.lengths name {name!r} is unknown: {nearest(name, LENGTH_NAMES)}.")
            value = "uniform" if name == "uniform" else (("name", name), ("seed", seed))
        elif isinstance(value, Sequence) and not isinstance(value, str):
            value = tuple(value)
            if not (len(value) == 2 and isinstance(value[0], tuple)):
                if any(isinstance(x, bool) or not isinstance(x, int) or x < 0 for x in value):
                    raise UserError("problem.lengths holds something that is not a whole number of at least 0.")
                if len(value) != self.b:
                    raise UserError(f"problem.lengths has {len(value)} entries for b = {self.b}: give one a request.")
                object.__setattr__(self, "t", max(value, default=0))
        elif value != "uniform":
            raise UserError(f"problem.lengths = {value!r} is neither a name, a mapping with name and seed, nor a list.")
        object.__setattr__(self, "lengths", value)

    # ---------------------------------------------------------------- derived
    @property
    def seq_lens(self) -> tuple[int, ...]:
        """The b lengths. Named distributions are drawn from `random.Random(seed)`, so they are the same everywhere.

        ragged: uniform in 0..t. normal: N(t, t/2), at least s and at most 2t (FlashMLA's own test draws so, with no
        upper end). edges: 0, 1, page - 1, page, page + 1, t - 1, t in turn.
        """
        value = self.lengths
        if value == "uniform":
            return (self.t,) * self.b
        if isinstance(value[0], int):
            return value
        spec = dict(value)
        rng = random.Random(spec["seed"])
        if spec["name"] == "ragged":
            return tuple(rng.randint(0, self.t) for _ in range(self.b))
        if spec["name"] == "normal":
            draws = (int(rng.normalvariate(self.t, self.t / 2)) for _ in range(self.b))
            return tuple(min(max(x, self.s), 2 * self.t) for x in draws)
        page = self.page_size
        edges = [x for x in (0, 1, page - 1, page, page + 1, self.t - 1, self.t) if 0 <= x <= self.t]
        return tuple(edges[i % len(edges)] for i in range(self.b))

    @property
    def fill(self) -> float:
        """Mean length over the longest one: 1 where all are equally long, and where none has a key."""
        if self.lengths == "uniform":
            return 1.0
        lengths = self.seq_lens
        return sum(lengths) / (len(lengths) * max(lengths)) if max(lengths) else 1.0

    @property
    def scale(self) -> float:
        """Factor on q·k before the softmax."""
        return (self.d + self.p) ** -0.5 if self.softmax_scale is None else self.softmax_scale

    @property
    def group(self) -> int:
        """Query heads that share one latent cache."""
        return self.h // self.h_kv

    @property
    def rows(self) -> int:
        """Query rows of one request and one latent cache: s · h / h_kv, token-major."""
        return self.s * self.group

    @property
    def page_size(self) -> int:
        """Tokens a page; a contiguous cache is read as 64-token pages in order."""
        return 64 if self.page is None else self.page

    @property
    def max_pages(self) -> int:
        """Width of the page table: pages of the longest request, at least 1."""
        return max(1, max(-(-x // self.page_size) for x in self.seq_lens))

    @property
    def element_bytes(self) -> int:
        return DTYPE_BYTES[self.dtype]

    @property
    def torch_dtype(self) -> Any:
        import torch

        return getattr(torch, _TORCH_DTYPES[self.dtype])

    @property
    def label(self) -> str:
        """Short name for tables and folders: b128_s1_h128_t4096, with what differs from the default appended."""
        text = f"b{self.b}_s{self.s}_h{self.h}_t{self.t}"
        if self.h_kv != 1:
            text += f"_kv{self.h_kv}"
        if self.n:
            text += f"_n{self.n}"
        if self.causal:
            text += "_causal"
        if self.lengths != "uniform":
            text += "_list" if isinstance(self.lengths[0], int) else f"_{dict(self.lengths)['name']}"
        if self.dtype != "bf16":
            text += f"_{self.dtype}"
        return text

    def problem_class(self) -> ProblemClass:
        """What compiled code depends on; problems of one class share kernels."""
        return ProblemClass(**{f.name: getattr(self, f.name) for f in dataclasses.fields(ProblemClass)})

    def replace(self, **changes: Any) -> MlaProblem:
        """A copy with other fields; changing b or t of a list of lengths needs new lengths too."""
        return dataclasses.replace(self, **changes)

    def to_record(self) -> dict[str, Any]:
        """The JSON form that records hold."""
        data = dataclasses.asdict(self)
        if self.lengths != "uniform":
            data["lengths"] = list(self.lengths) if isinstance(self.lengths[0], int) else dict(self.lengths)
        if self.softmax_scale is None:
            del data["softmax_scale"]
        return data

    @classmethod
    def from_record(cls, data: Mapping[str, Any]) -> MlaProblem:
        """Inverse of `to_record`; an unknown field is a `UserError` that names the nearest."""
        names = [f.name for f in dataclasses.fields(cls)]
        for key in data:
            if key not in names:
                raise UserError(f"problem has no field {key!r}: {nearest(str(key), names)}.")
        return cls(**dict(data))

    @classmethod
    def of(cls, geometry: str, **fields: Any) -> MlaProblem:
        """A problem with the heads and dims of a named model; explicit fields win."""
        if geometry not in GEOMETRIES:
            raise UserError(f"model geometry {geometry!r} is unknown: {nearest(geometry, GEOMETRIES)}.")
        return cls(**{**GEOMETRIES[geometry], **fields})

    # ---------------------------------------------------------------- cost
    def _pairs(self) -> Iterator[tuple[int, int, int]]:
        """For each request: cached tokens, attending pairs with the old tokens, and with the n newest, of one head.

        Without a mask every query token attends to all L tokens. With it, query token i attends to the first
        L - s + i + 1 (none when that is not positive), of which the first L - n are old.
        """
        for length in self.seq_lens:
            old_tokens = max(length - self.n, 0)
            if not self.causal:
                yield length, self.s * old_tokens, self.s * (length - old_tokens)
                continue
            seen = [max(length - self.s + i + 1, 0) for i in range(self.s)]
            old = sum(min(x, old_tokens) for x in seen)
            yield length, old, sum(seen) - old

    def _moved(self, *, absorbed: bool, decompressed: bool) -> int:
        """Bytes of q read and of outputs written: the two forms of q share their rope columns."""
        latent = (2 * self.k) if absorbed else 0
        heads = (2 * self.d) if decompressed else 0
        return self.b * self.s * self.h * (latent + heads + self.p) * self.element_bytes

    def cost(self, formulation: str = "absorbed") -> Cost:
        """FLOPs and minimal bytes of one formulation; log-sum-exps and page tables (under 1 %) are not counted.

        absorbed: each head's query is in latent space, K = [latent | rope], V = latent. A pair costs 2(k + p) for
            q·k and 2k for p·v. Bytes: each cached token (k + p columns, per latent cache) once, q in (k + p) and
            out (k) once per query row. With k = 512, p = 64 that is 2176 FLOPs a pair and 1152 B a token in bf16.
        decompressed: per head K has d + p and V has d columns. A pair costs 2(d + p) + 2d. Bytes: h(2d + p) columns a
            cached token, q (d + p) and out (d) per row.
        mixed: the first L - n tokens of each request as absorbed, the newest n as decompressed; q is read in both
            forms (rope columns once), and both partial outputs are written. n = 0 equals absorbed, n >= L
            decompressed. The projections that join the two (`projection_cost`) belong to the layer's GEMMs.
        """
        if formulation not in FORMULATIONS:
            raise UserError(f"formulation {formulation!r} is unknown: {nearest(formulation, FORMULATIONS)}.")
        e = self.element_bytes
        latent_token = self.h_kv * (self.k + self.p) * e
        head_token = self.h * (2 * self.d + self.p) * e
        latent_pair = 2 * (2 * self.k + self.p) * self.h
        head_pair = 2 * (2 * self.d + self.p) * self.h
        flops = tokens = pairs = 0
        any_old = any_new = False
        for length, old, new in self._pairs():
            if formulation == "absorbed":
                old, new, new_tokens = old + new, 0, 0
            elif formulation == "decompressed":
                old, new, new_tokens = 0, old + new, length
            else:
                new_tokens = min(self.n, length)
            flops += old * latent_pair + new * head_pair
            tokens += (length - new_tokens) * latent_token + new_tokens * head_token
            pairs += old + new
            any_old, any_new = any_old or length > new_tokens, any_new or new_tokens > 0
        if not (any_old or any_new):
            any_old, any_new = formulation != "decompressed", formulation == "decompressed"
        return Cost(flops, tokens + self._moved(absorbed=any_old, decompressed=any_new), pairs)

    def projection_cost(self) -> Cost:
        """Absorbing q (per head d -> k) and bringing the output back (k -> d): what the absorbed form moves into GEMMs.

        FLOPs: 2 · 2dk a query row. Bytes: both weights (h · d · k each) and the four activations once.
        """
        rows = self.b * self.s * self.h
        weights = 2 * self.h * self.d * self.k * self.element_bytes
        return Cost(rows * 4 * self.d * self.k, weights + rows * 2 * (self.d + self.k) * self.element_bytes, 0)

    def input_bytes(self) -> int:
        """Device memory of one absorbed input set with its outputs, padding of the pages included."""
        cache = self.b * self.max_pages * self.page_size * self.h_kv * (self.k + self.p)
        rows = self.b * self.s * self.h * (2 * self.k + self.p)
        return (cache + rows) * self.element_bytes + 4 * self.b * (self.s * self.h + self.max_pages + 1)
