"""examples/serve_deepseek.py with tiny sizes on a CPU: what it prints, and that its checks can fail."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers", reason="transformers is in the extra `layers`: make test installs it")

from mla_var3.layers import attention  # noqa: E402

TINY = "--layers 2 --heads 2 --hidden 128 --prompt 80 --requests 3 --tokens 8".split()


@pytest.fixture
def example(repo_root: Path, module_at: Callable[[Path], Any], monkeypatch: pytest.MonkeyPatch) -> Any:
    module = module_at(repo_root / "examples" / "serve_deepseek.py")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    return module


def in_bf16(example: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU: the check of rounded logits in place of that of tokens."""
    serve = example.serve
    monkeypatch.setattr(example, "serve", lambda *given: serve(*given[:-1], torch.bfloat16))


def test_it_generates_what_transformers_does(example: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert example.main(TINY) == 0
    text = capsys.readouterr().out
    assert "tokens equal to the original's: 24 of 24\n" in text
    assert "3 requests of 6 to 80 tokens, 8 generated, torch.float32 on cpu\n" in text
    prompts = re.search(r"^prompts, (\d+) tokens in all: ours ([\d.]+) ms, transformers ([\d.]+) ms$", text, re.M)
    assert prompts is not None and prompts[1] == "129" and min(map(float, prompts.groups()[1:])) > 0
    rates = re.findall(
        r"^(ours|transformers): +([\d.]+) tokens a second; a token's cache in a layer: (\d+) ", text, re.M
    )
    assert [(who, elements) for who, _, elements in rates] == [("ours", "576"), ("transformers", "576")]
    assert all(float(rate) > 0 for _, rate, _ in rates)
    assert "576 elements, the latent, decompressed into K and V in every step" in text


def test_in_bf16_rounding_is_judged(
    example: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    in_bf16(example, monkeypatch)
    monkeypatch.setattr(example, "rates", lambda *_: (0.0, 0.0))
    assert example.main(TINY) == 0
    assert "torch.bfloat16 on cpu" in capsys.readouterr().out


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_attention_that_is_wrong_is_found(
    dtype: str, example: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    read = attention.read_config
    monkeypatch.setattr(attention, "read_config", lambda c: dataclasses.replace(read(c), interleaved=False))
    monkeypatch.setattr(example, "rates", lambda *_: (0.0, 0.0))
    if dtype == "bfloat16":
        in_bf16(example, monkeypatch)
    assert example.main(TINY) == 1
    assert capsys.readouterr().err == "wrong: this is not what the original computes\n"


@pytest.mark.parametrize("arguments", [["--tokens", "1"], ["--prompt", "0"], ["--requests", "0"]])
def test_sizes_that_cannot_be_are_refused(
    example: Any, arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as raised:
        example.main(arguments)
    assert raised.value.code == 2
    assert "error: give at least 2 tokens to generate, and at least 1 of the rest" in capsys.readouterr().err
