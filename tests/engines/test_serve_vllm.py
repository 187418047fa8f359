"""examples/serve_vllm.py and scripts/pack_vllm.py, without vLLM: engines are processes that answer as told."""

from __future__ import annotations

import json
import struct
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("safetensors", reason="safetensors is not installed")

#: In the place of vLLM: tokens and logits of its own, and an end where a name says so.
STUB = """
import importlib.util, sys, torch
spec = importlib.util.spec_from_file_location("serve_vllm", sys.argv.pop(1))
serve = importlib.util.module_from_spec(spec); sys.modules["serve_vllm"] = serve; spec.loader.exec_module(serve)
class Stub:
    def __init__(self, model, engine, given):
        if engine == "MLA_VAR3+MLA_VAR3":
            raise ImportError("no such library")
        self.off = {"MLA_VAR3 full": 0.5}.get(engine, 1e-3) if "MLA_VAR3" in engine else 0
    def logits(self, file, forced=""):
        rows = torch.randn(4, 8, 16, generator=torch.Generator().manual_seed(0))
        tokens = torch.load(forced)["tokens"] if forced else rows.argmax(-1).tolist()
        torch.save({"tokens": tokens, "prompts": [[-1.0, -2.0 + self.off]], "logits": rows + self.off}, file)
        return {"seconds": 1.0, "graphs": "FULL"}
    def time(self, seed):
        found = dict.fromkeys(("prefill_tokens_a_second", "decode_tokens_a_second"), 10.0 + seed)
        found |= {"prompt_tokens": 5, "cached_prompt_tokens": 4, "prefix_cached_seconds": 0.1}
        return found | {"first_tokens": [[1, 2]]}
    def kernels(self):
        return {"us_a_step": 12.0, "kernels": [[10.0, 4.0, "attend"]]}
serve.Worker = Stub
serve.main(sys.argv[1:])
"""


def test_engines_are_compared_and_a_failure_does_not_end_the_others(
    repo_root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
    module_at: Callable[[Path], Any],
) -> None:  # fmt: skip
    serve = module_at(repo_root / "examples" / "serve_vllm.py")
    monkeypatch.setattr(serve, "HIDDEN", 32)
    monkeypatch.setattr(serve, "Q_LORA", 32)
    real = subprocess.Popen

    def started(words: list[str], **options: Any) -> Any:
        return real([words[0], "-c", STUB, *words[1:]], **options)

    monkeypatch.setattr(serve.subprocess, "Popen", started)
    assert serve.main([str(tmp_path), "--heads", "2", "--rounds", "1", "--seconds", "120"]) == 1
    said = capsys.readouterr().out
    assert "MLA_VAR3+MLA_VAR3, 2 heads: failed: ImportError: no such library" in said
    assert "FLASH_ATTN_MLA, 2 heads, FULL, against FLASHMLA: right: logits of 32 positions" in said
    assert "MLA_VAR3, 2 heads, FULL, against FLASHMLA: right: logits of 32 positions" in said
    assert "MLA_VAR3 full, 2 heads, FULL, against FLASHMLA: WRONG" in said
    assert "MLA_VAR3 spec, 2 heads: prefill_tokens_a_second 120, decode" in said
    assert "12 us of kernels in a step of decode\n        10.0 us,   4.0 calls: attend" in said
    assert "same_tokens_as_without_drafts 1" in said
    records = json.loads((tmp_path / "results.json").read_text())
    assert {record["engine"] for record in records} == set(serve.ENGINES) and (tmp_path / "results.txt").exists()
    config = json.loads((tmp_path / "model2" / "config.json").read_text())
    assert (config["num_attention_heads"], config["qk_rope_head_dim"]) == (2, 64)
    lengths = [len(prompt) for prompt in serve.prompts(64, 3, 3000, seed=1)]
    assert (len(lengths), min(lengths), max(lengths)) == (64, 3, 3000)


def test_other_machine_code_is_overwritten(repo_root: Path, tmp_path: Path, module_at: Callable[[Path], Any]) -> None:
    pack = module_at(repo_root / "scripts" / "pack_vllm.py")

    def entry(kind: int, architecture: int, code: bytes) -> bytes:
        return struct.pack("<HHIQ12xI32x", kind, 1, 64, len(code), architecture) + code

    kept, other, text = b"kept" * 4, b"other" * 4, b"text" * 2
    entries = entry(2, 90, kept) + entry(2, 80, other) + entry(1, 90, text)
    library = tmp_path / "library.so"
    library.write_bytes(b"before" + pack.MAGIC + struct.pack("<HHQ", 1, 16, len(entries)) + entries + b"after")
    assert pack.prune(library, 90) == len(other) + len(text)
    left = bytearray(library.read_bytes())
    assert kept in left and other not in left and text not in left and left.endswith(b"after")
    assert [(kind, made_for) for kind, made_for, _, _ in pack.machine_code(left)] == [(2, 90), (2, 120), (1, 120)]
