#!/usr/bin/env python3
"""Serves a small DeepSeek-V3 with vLLM, once with vLLM's own attention backends and once with `MLA_VAR3`.

    python examples/serve_vllm.py out/vllm                      # on a Hopper GPU
    MLA_VAR3_BUNDLES=$PWD/bundle python examples/serve_vllm.py out/vllm --heads 16

The model has random weights, DeepSeek's sizes of attention, few layers and tiny experts. It is written into the
folder, and nothing is downloaded. Every backend is an engine in a process of its own, with CUDA graphs, chunked prompts
and prefix caching. First the backends compute the same tokens: FLASHMLA generates greedily from prompts of different
lengths, its tokens are forced upon the others, and logits of all generated positions and log probabilities of all
tokens of prompts are compared. Then tokens a second are measured, the engines in turn, with two speculative tokens
as well.

Into the folder go `results.json`, `results.txt` and the log of each engine. An engine that fails is reported with the
end of its log, and the others go on. Exits with 1 where a check or an engine fails.

Needs the package vllm beside this one, and the extra cute or a bundle.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

VOCABULARY, HIDDEN, LAYERS = 512, 2048, 4
Q_LORA, KV_LORA, NOPE, ROPE, V = 1536, 512, 128, 64, 128
#: What FLASHMLA generated is forced upon the others.
FIRST = "FLASHMLA"
#: Attention backend and, after a plus, the backend of prompts. With `spec` two tokens are drafted by n-grams. CUDA
#: graphs hold decode alone, or with `full` any batch, which the others cannot.
ENGINES = (
    FIRST, "MLA_VAR3", "MLA_VAR3 full", "FLASH_ATTN_MLA", "MLA_VAR3+MLA_VAR3", "FLASHMLA spec", "MLA_VAR3 spec",
)  # fmt: skip
#: Norm of the difference of two backends' logits over the norm of the logits: the median and largest over positions.
BOUNDS = 0.02, 0.08
#: Log probability of a token of a prompt: the mean and largest difference.
PROMPT_BOUNDS = 0.02, 0.25
#: How a line of an engine's process begins that answers the first one.
ANSWER = "answer: "


# ---------------------------------------------------------------- the model
def config(heads: int, experts: int) -> dict[str, Any]:
    return {
        "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "torch_dtype": "bfloat16",
        "vocab_size": VOCABULARY, "hidden_size": HIDDEN, "num_hidden_layers": LAYERS, "num_attention_heads": heads,
        "num_key_value_heads": heads, "q_lora_rank": Q_LORA, "kv_lora_rank": KV_LORA, "qk_nope_head_dim": NOPE,
        "qk_rope_head_dim": ROPE, "v_head_dim": V, "intermediate_size": 1024, "moe_intermediate_size": 256,
        "first_k_dense_replace": 1 if experts else LAYERS, "moe_layer_freq": 1, "n_routed_experts": experts or 8,
        "n_shared_experts": 1,
        # Every token goes to all experts: the choice of some could turn on the rounding of attention.
        "num_experts_per_tok": experts or 8, "n_group": 1, "topk_group": 1, "topk_method": "noaux_tc",
        "scoring_func": "sigmoid", "norm_topk_prob": True, "routed_scaling_factor": 2.5, "hidden_act": "silu",
        "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "rope_scaling": None, "max_position_embeddings": 8192,
        "attention_bias": False, "tie_word_embeddings": False, "bos_token_id": 0, "eos_token_id": 1,
        "num_nextn_predict_layers": 0, "use_cache": True,
    }  # fmt: skip


def shapes(heads: int, routed: int) -> Iterator[tuple[str, tuple[int, ...], float]]:
    """Name and shape of each weight, and how its spread differs from 1 / sqrt(inputs); of norms it is 0."""
    yield "model.embed_tokens.weight", (VOCABULARY, HIDDEN), HIDDEN**0.5
    yield "lm_head.weight", (VOCABULARY, HIDDEN), 2.0
    yield "model.norm.weight", (HIDDEN,), 0
    for i in range(LAYERS):
        at = f"model.layers.{i}."
        yield at + "input_layernorm.weight", (HIDDEN,), 0
        yield at + "post_attention_layernorm.weight", (HIDDEN,), 0
        yield at + "self_attn.q_a_proj.weight", (Q_LORA, HIDDEN), 1
        yield at + "self_attn.q_a_layernorm.weight", (Q_LORA,), 0
        # Scores of spread 2.5: a query attends to a few keys, and not to all of them alike.
        yield at + "self_attn.q_b_proj.weight", (heads * (NOPE + ROPE), Q_LORA), 2.5
        yield at + "self_attn.kv_a_proj_with_mqa.weight", (KV_LORA + ROPE, HIDDEN), 1
        yield at + "self_attn.kv_a_layernorm.weight", (KV_LORA,), 0
        yield at + "self_attn.kv_b_proj.weight", (heads * (NOPE + V), KV_LORA), 1
        yield at + "self_attn.o_proj.weight", (HIDDEN, heads * V), 1.5
        if i == 0 or not routed:
            experts = {"mlp.": 1024}
        else:
            experts = {f"mlp.experts.{j}.": 256 for j in range(routed)} | {"mlp.shared_experts.": 256}
            yield at + "mlp.gate.weight", (routed, HIDDEN), 1
            yield at + "mlp.gate.e_score_correction_bias", (routed,), 0
        for name, width in experts.items():
            yield at + name + "gate_proj.weight", (width, HIDDEN), 1
            yield at + name + "up_proj.weight", (width, HIDDEN), 1
            yield at + name + "down_proj.weight", (HIDDEN, width), 0.5


def write_model(folder: Path, heads: int, experts: int) -> None:
    import torch
    from safetensors.torch import save_file

    device = "cuda" if torch.cuda.is_available() else "cpu"
    generator = torch.Generator(device).manual_seed(heads)
    weights = {}
    for name, shape, spread in shapes(heads, experts):
        if spread:
            weight = torch.randn(shape, generator=generator, device=device) * (spread * shape[-1] ** -0.5)
        else:
            weight = torch.ones(shape)
        weights[name] = weight.float().cpu() if name.endswith("bias") else weight.bfloat16().cpu()
    folder.mkdir(parents=True, exist_ok=True)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config(heads, experts), indent=1))


def prompts(count: int, shortest: int, longest: int, seed: int) -> list[list[int]]:
    """Of lengths that differ, as many short as long ones on a logarithmic scale."""
    draw = random.Random(seed)
    ratio = (longest / shortest) ** (1 / max(1, count - 1))
    lengths = [round(shortest * ratio**i) for i in range(count)]
    draw.shuffle(lengths)
    return [[draw.randrange(2, VOCABULARY) for _ in range(length)] for length in lengths]


# ---------------------------------------------------------------- an engine, in a process of its own
class Worker:
    """Makes an engine and does what lines of its input ask."""

    def __init__(self, model: str, engine: str, given: argparse.Namespace) -> None:
        attention, _, rest = engine.partition(" ")
        decode, _, prefill = attention.partition("+")
        from vllm import LLM

        from mla_var3.engines.vllm import register

        register()  # an installed package is found by its entry point; a checkout on the path of modules is not
        backends = {"backend": decode} | ({"mla_prefill_backend": prefill} if prefill else {})
        options: dict[str, Any] = {}
        if rest == "spec":
            drafts = {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 3, "prompt_lookup_min": 1}
            options["speculative_config"] = drafts
        else:
            options["logits_processors"] = [forced_logits()]
        self.spec = rest == "spec"
        graphs = "NONE" if given.eager else "FULL" if rest == "full" else "FULL_DECODE_ONLY"
        self.llm = LLM(
            model, skip_tokenizer_init=True, dtype="bfloat16", block_size=64, max_model_len=8192, seed=0,
            max_num_seqs=64, max_num_batched_tokens=2048, enable_chunked_prefill=True, enable_prefix_caching=True,
            gpu_memory_utilization=0.02, kv_cache_memory_bytes=1 << 30, attention_config=backends,
            enforce_eager=given.eager, disable_log_stats=False,
            compilation_config={
                # Nothing is traced or fused: an engine starts in seconds, and attention is what differs.
                "mode": 0, "cudagraph_mode": graphs,
                "cudagraph_capture_sizes": [1, 2, 4, 8, 16, 32, 64, 96, 128, 192],
            },
            **options,
        )  # fmt: skip
        settings = self.llm.llm_engine.vllm_config
        self.graphs = str(settings.compilation_config.cudagraph_mode)

    def generate(self, asked: Sequence[Sequence[int]], new: int, forced: Any = None, logits: bool = False) -> Any:
        """The outputs and seconds. forced: tokens of each request. logits: those of all positions are kept."""
        from vllm import SamplingParams

        params = []
        for i in range(len(asked)):
            more: dict[str, Any] = {}
            if logits:
                more = {"prompt_logprobs": 0, "extra_args": {"row": i, "forced": forced[i] if forced else None}}
            params.append(SamplingParams(temperature=0, max_tokens=new, ignore_eos=True, detokenize=False, **more))
        given: Any = [{"prompt_token_ids": list(tokens)} for tokens in asked]
        begun = time.perf_counter()
        made = self.llm.generate(given, params, use_tqdm=False)
        return made, time.perf_counter() - begun

    def logits(self, folder: str, forced_from: str = "") -> dict[str, Any]:
        """Generates and writes tokens, logits and log probabilities of prompts into a file."""
        import torch

        forced = torch.load(Path(forced_from), weights_only=True)["tokens"] if forced_from else None
        asked = prompts(64, 3, 3000, seed=1)
        KEPT.clear()
        made, seconds = self.generate(asked, 32, forced, logits=True)
        tokens = [list(one.outputs[0].token_ids) for one in made]
        of_prompts = [
            [position[token].logprob for position, token in zip(one.prompt_logprobs[1:], prompt[1:], strict=True)]
            for one, prompt in zip(made, asked, strict=True)
        ]
        logits = torch.stack([torch.stack([KEPT[i, j] for j in range(32)]) for i in range(len(asked))]).float().cpu()
        torch.save({"tokens": tokens, "prompts": of_prompts, "logits": logits}, folder)
        return {"seconds": seconds, "graphs": self.graphs}

    def time(self, seed: int) -> dict[str, Any]:
        """Tokens a second: prompts of which nothing is cached, the same again, and decode by itself."""
        asked = prompts(64, 500, 4000, seed)
        found: dict[str, Any] = {"prompt_tokens": sum(map(len, asked)), "requests": len(asked)}
        made, first = self.generate(asked, 1)
        again, second = self.generate(asked, 1)
        found["prefill_tokens_a_second"] = found["prompt_tokens"] / first
        found["cached_prompt_tokens"] = sum(one.num_cached_tokens or 0 for one in again)
        found["prefix_cached_seconds"] = second
        made, both = self.generate(asked, 129)
        found["decode_tokens_a_second"] = 128 * len(asked) / (both - second)
        found["tokens_a_second"] = 129 * len(asked) / (first + both - second)
        _, short = self.generate(asked[:4], 129)
        found["few_tokens_a_second"] = 129 * 4 / short
        found["first_tokens"] = [list(one.outputs[0].token_ids) for one in made]
        if self.spec:
            counters = (m for m in self.llm.get_metrics() if "spec_decode" in m.name)
            found["drafts"] = {m.name: m.value for m in counters if hasattr(m, "value")}
        # Prompts and decodes in the same steps: requests come while others decode.
        mixed = prompts(128, 100, 2000, seed + 1)
        _, seconds = self.generate(mixed, 64)
        found["mixed_tokens_a_second"] = (64 * len(mixed) + sum(map(len, mixed))) / seconds
        return found

    def kernels(self) -> dict[str, Any]:
        """What a step of decode takes on the GPU, by kernels: the host hides much of it in tokens a second."""
        from torch.profiler import ProfilerActivity, profile

        asked = prompts(64, 2000, 4000, seed=7)
        self.generate(asked, 2)
        try:
            with profile(activities=[ProfilerActivity.CUDA]) as seen:
                self.generate(asked, 33)
        except RuntimeError as error:  # no access to the profiler of the GPU
            return {"unseen": str(error)}
        spent = [(e.self_device_time_total / 33, e.count / 33, e.key[:160]) for e in seen.key_averages()]
        return {"us_a_step": sum(us for us, _, _ in spent), "kernels": sorted(spent, reverse=True)[:16]}


KEPT: dict[tuple[int, int], Any] = {}


def forced_logits() -> Any:
    """A logits processor that keeps the logits of requests that ask for it, and lets only the forced token through."""
    from vllm.v1.sample.logits_processor import AdapterLogitsProcessor

    class Forced(AdapterLogitsProcessor):
        def is_argmax_invariant(self) -> bool:
            return False

        def new_req_logits_processor(self, params: Any) -> Any:
            asked = params.extra_args or {}
            if "row" not in asked:
                return None

            def apply(output: Sequence[int], logits: Any) -> Any:
                KEPT[asked["row"], len(output)] = logits.clone()
                if asked["forced"] and len(output) < len(asked["forced"]):
                    token = asked["forced"][len(output)]
                    kept = logits[token].clone()
                    logits.fill_(-float("inf"))
                    logits[token] = kept
                return logits

            return apply

    return Forced


def work(given: argparse.Namespace) -> None:
    """The process of an engine. Answers go to the descriptor that was standard output; all else is its log."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def answer(**what: Any) -> None:
        print(ANSWER + json.dumps(what), file=answers, flush=True)

    try:
        worker = Worker(given.model, given.engine, given)
        answer(ready=True)
        for line in sys.stdin:
            name, *args = json.loads(line)
            answer(done=getattr(worker, name)(*args))
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        answer(failed=traceback.format_exc().strip().splitlines()[-1])
        os._exit(1)


# ---------------------------------------------------------------- all of them
@dataclass
class Engine:
    """What the first process knows of an engine."""

    name: str
    heads: int
    process: subprocess.Popen[str]
    log: Path
    failed: str = ""
    found: dict[str, Any] = field(default_factory=dict)

    def hear(self, seconds: float) -> Any:
        """The next answer, or None if the engine failed or took longer."""
        timer = threading.Timer(max(1.0, seconds), self.process.kill)
        timer.start()
        line = next((line for line in self.process.stdout or () if line.startswith(ANSWER)), "")
        timer.cancel()
        ended = {"failed": f"no answer in {seconds:.0f} s, or it ended"}
        said = json.loads(line.removeprefix(ANSWER)) if line else ended
        self.failed = said.get("failed", "")
        return None if self.failed else said.get("done", said)

    def tell(self, *what: Any) -> None:
        try:
            assert self.process.stdin is not None
            print(json.dumps(what), file=self.process.stdin, flush=True)
        except OSError:
            pass  # `hear` says that it ended


class Report:
    def __init__(self, folder: Path) -> None:
        self.folder, self.records, self.begun = folder, [], time.perf_counter()  # type: ignore[var-annotated]
        self.text = (folder / "results.txt").open("w")

    def say(self, text: str) -> None:
        for to in (sys.stdout, self.text):
            print(f"[{time.perf_counter() - self.begun:5.0f} s] {text}", file=to, flush=True)

    def keep(self, **record: Any) -> None:
        self.records.append(record)
        (self.folder / "results.json").write_text(json.dumps(self.records, indent=1))


def compare(ours: Path, theirs: Path) -> dict[str, Any]:
    """How far two backends' logits of the same tokens are apart."""
    import torch

    one, other = (torch.load(path, weights_only=True) for path in (ours, theirs))
    off = (one["logits"] - other["logits"]).norm(dim=-1) / other["logits"].norm(dim=-1)
    chosen = one["logits"].argmax(-1) == other["logits"].argmax(-1)
    of_prompts = torch.cat(
        [(torch.tensor(a) - torch.tensor(b)).abs() for a, b in zip(one["prompts"], other["prompts"], strict=True)]
    )
    found = {
        "positions": off.numel(), "median": off.median().item(), "largest": off.max().item(),
        "same_choice": chosen.float().mean().item(), "prompt_positions": of_prompts.numel(),
        "prompt_mean": of_prompts.mean().item(), "prompt_largest": of_prompts.max().item(),
    }  # fmt: skip
    bounds = zip((found["median"], found["largest"], found["prompt_mean"], found["prompt_largest"]),
                 BOUNDS + PROMPT_BOUNDS, strict=True)  # fmt: skip
    found["right"] = all(value <= bound for value, bound in bounds)
    return found


def start(folder: Path, name: str, heads: int, given: argparse.Namespace) -> Engine:
    log = folder / f"{name.replace('+', '_with_').replace(' ', '_')}_{heads}.log"
    words = [sys.executable, __file__, str(folder), "--engine", name, "--model", str(folder / f"model{heads}")]
    # Offline, and in one process, so that a failure is seen where it happens.
    env = {
        **os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "VLLM_HOST_IP": "127.0.0.1",
        "VLLM_USE_FLASHINFER_SAMPLER": "0", "TOKENIZERS_PARALLELISM": "false", "TORCH_COMPILE_DISABLE": "1",
        # Whatever the number of experts, torch chooses.
        "VLLM_USE_FUSED_MOE_GROUPED_TOPK": "0",
    }  # fmt: skip
    process = subprocess.Popen(
        words + (["--eager"] if given.eager else []), stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        stderr=log.open("w"), text=True, env=env,
    )  # fmt: skip
    return Engine(name, heads, process, log)


def lost(engine: Engine, report: Report) -> bool:
    if engine.failed:
        lines = engine.log.read_text(errors="replace").splitlines()[-200:]
        report.say(f"{engine.name}, {engine.heads} heads: failed: {engine.failed}\n" + "\n".join(lines))
        report.keep(engine=engine.name, heads=engine.heads, failed=engine.failed)
    return bool(engine.failed)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])  # type: ignore[union-attr]
    parser.add_argument("folder", type=Path, help="where the model, logs and results go")
    parser.add_argument("--heads", type=int, nargs="+", default=[16, 128], help="attention heads; each is a model")
    parser.add_argument("--engines", nargs="+", default=list(ENGINES), help="which of them: " + ", ".join(ENGINES))
    parser.add_argument("--experts", type=int, default=8, help="experts of a layer; 0 leaves them out")
    parser.add_argument("--rounds", type=int, default=2, help="how often tokens a second are measured, after a warm-up")
    parser.add_argument("--eager", action="store_true", help="no CUDA graphs")
    parser.add_argument("--seconds", type=float, default=600, help="how long all may take")
    parser.add_argument("--engine", help=argparse.SUPPRESS)
    parser.add_argument("--model", help=argparse.SUPPRESS)
    given = parser.parse_args(argv)
    if given.engine:
        work(given)
        return 0
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # engines are ended with this process
    given.folder.mkdir(parents=True, exist_ok=True)
    report = Report(given.folder)
    for heads in given.heads:
        write_model(given.folder / f"model{heads}", heads, given.experts)
    report.say("models written")
    engines = [start(given.folder, name, heads, given) for heads in given.heads for name in given.engines]
    try:
        return serve(engines, report, given)
    finally:
        for engine in engines:
            engine.process.kill()
        report.say("end")


def file_of(engine: Engine, given: argparse.Namespace) -> Path:
    return Path(given.folder / f"{engine.log.stem}.pt")


def judged(engine: Engine, first: Path, said: Any, report: Report, given: argparse.Namespace) -> bool:
    found = compare(file_of(engine, given), first)
    report.keep(engine=engine.name, heads=engine.heads, against=FIRST, graphs=said["graphs"], logits=found)
    report.say(
        f"{engine.name}, {engine.heads} heads, {said['graphs']}, against {FIRST}: "
        f"{'right' if found['right'] else 'WRONG'}: logits of {found['positions']} positions differ by "
        f"{found['median']:.4f} of their norm in the median, {found['largest']:.4f} at most; "
        f"{found['same_choice']:.2%} equal greedy choices; log probabilities of {found['prompt_positions']} "
        f"tokens of prompts by {found['prompt_mean']:.4f} in the mean, {found['prompt_largest']:.4f} at most"
    )
    return bool(found["right"])


def serve(engines: list[Engine], report: Report, given: argparse.Namespace) -> int:
    wrong = 0

    def left() -> float:
        return given.seconds - (time.perf_counter() - report.begun)

    for engine in engines:
        engine.hear(min(150, left()))
        if not lost(engine, report):
            report.say(f"{engine.name}, {engine.heads} heads: ready")
    # The same tokens by all: each model's first engine generates them, then they are forced upon the others.
    files: dict[int, Path] = {}
    for firsts in (True, False):
        asked = [e for e in engines if not e.failed and (e.name == FIRST) == firsts and not e.name.endswith(" spec")]
        for engine in asked:
            engine.tell("logits", str(file_of(engine, given)), str(files.get(engine.heads, "")))
        for engine in asked:
            said = engine.hear(min(90, left()))
            if lost(engine, report):
                continue
            first = files.setdefault(engine.heads, file_of(engine, given))
            if first == file_of(engine, given):
                seconds = said["seconds"]
                report.say(f"{engine.name}, {engine.heads} heads, {said['graphs']}: generated in {seconds:.1f} s")
            else:
                right = judged(engine, first, said, report, given)  # of other backends too: how far apart two may be
                wrong += "MLA_VAR3" in engine.name and not right
    # Tokens a second: all warm up at once, then each is measured alone, in turn.
    for turn in range(given.rounds + 1 if given.rounds else 0):
        if turn == 0:
            for engine in engines:
                engine.tell("time", 100)
        for engine in (e for e in engines if not e.failed):
            if turn and left() < 10:
                break
            if turn:
                engine.tell("time", 100 + 10 * turn)
            said = engine.hear(min(120, left()))
            if lost(engine, report) or turn == 0:
                continue
            engine.found.setdefault("rounds", []).append(said)
            figures = ", ".join(f"{k.removesuffix('_a_second')} {v:.0f}/s" for k, v in said.items() if "a_second" in k)
            more = f", prompts of which {said['cached_prompt_tokens']} of {said['prompt_tokens']} tokens are cached "
            more += f"{said['prefix_cached_seconds'] * 1e3:.0f} ms"
            more += f", {said['drafts']}" if "drafts" in said else ""
            report.say(f"round {turn}: {engine.name}, {engine.heads} heads: {figures}{more}")
            report.keep(engine=engine.name, heads=engine.heads, turn=turn, **said | {"first_tokens": None})
        for engine in (e for e in engines if turn == 1 and not e.failed and not e.name.endswith(" spec")):
            if left() < 10:
                break
            engine.tell("kernels")
            said = engine.hear(min(60, left()))
            if lost(engine, report):
                continue
            report.keep(engine=engine.name, heads=engine.heads, **said)
            most = "".join(
                f"\n    {us:8.1f} us, {count:5.1f} calls: {name}" for us, count, name in said.get("kernels", [])[:8]
            )
            step = f"{said.get('us_a_step', 0):.0f} us of kernels in a step of decode" + said.get("unseen", "")
            report.say(f"{engine.name}, {engine.heads} heads: {step}{most}")
    for engine in (e for e in engines if e.found):
        rounds = engine.found["rounds"]
        middle = {key: statistics.median(r[key] for r in rounds) for key in rounds[-1] if key.endswith("_a_second")}
        of_model = (e for e in engines if e.heads == engine.heads and e.found)
        plain = next((e for e in of_model if f"{e.name} spec" == engine.name), None)
        if plain is not None:
            both = zip(rounds[-1]["first_tokens"], plain.found["rounds"][-1]["first_tokens"], strict=False)
            same = [a == b for x, y in both for a, b in zip(x, y, strict=True)]
            middle["same_tokens_as_without_drafts"] = sum(same) / len(same)
        report.keep(engine=engine.name, heads=engine.heads, median=middle, rounds=len(rounds))
        report.say(f"{engine.name}, {engine.heads} heads: " + ", ".join(f"{k} {v:.4g}" for k, v in middle.items()))
    return int(wrong > 0 or any(e.failed for e in engines))


if __name__ == "__main__":
    sys.exit(main())
