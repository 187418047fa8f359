"""Other people's kernels, unmodified, from a checkout that is not part of this repository.

    MLA_VAR3_TILEGYM=/path/to/TileGym                 its attention, matmul, norm and softmax kernels
    MLA_VAR3_CUTILE_PYTHON=/path/to/cutile-python     the kernels of its tests

Without the variable a test is skipped. Wrappers of these projects ask for a GPU: a pretended one answers.
Both projects rely on padding that is not determined being zero, and on tiles outside their array being padding, in
places; so they run with `poison=False, strict=False`, and what breaks under the strict options is tested as such.
"""

from __future__ import annotations

import importlib
import math
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from mla_var3 import cutile_cpu


def _checkout(variable: str, inside: str) -> Path:
    place = os.environ.get(variable)
    if not place:
        pytest.skip(f"{variable} names no checkout")
    path = Path(place) / inside
    if not path.is_dir():
        pytest.skip(f"{variable}: there is no {path}")
    return path


@pytest.fixture
def pretended_gpu() -> Iterator[None]:
    with cutile_cpu.pretend_gpu(sms=4, poison=False, strict=False):  # few, because persistent kernels launch as many
        yield


@pytest.fixture
def tilegym(pretended_gpu: None, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Any]:
    monkeypatch.syspath_prepend(str(_checkout("MLA_VAR3_TILEGYM", "src")))
    return lambda name: importlib.import_module(f"tilegym.ops.cutile.{name}")


def draw(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0, scale: float = 1.0) -> torch.Tensor:
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * scale).to(dtype)


def close(got: torch.Tensor, want: torch.Tensor, rtol: float = 2e-2, atol: float = 2e-2) -> None:
    torch.testing.assert_close(got.double(), want.double(), rtol=rtol, atol=atol)


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, causal: bool = False) -> torch.Tensor:
    """(b, h, s, d) in float64; query heads share key heads."""
    q, k, v = q.double(), *(t.double().repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v))
    scores = q @ k.transpose(-1, -2) * scale
    if causal:
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool).tril(scores.shape[-1] - scores.shape[-2])
        scores = scores.masked_fill(~mask, -math.inf)
    return torch.softmax(scores, -1) @ v


# ---------------------------------------------------------------- TileGym
@pytest.mark.parametrize("flags", [{}, {"use_tma": True}, {"use_chunked": True}, {"use_multi_wave": True}], ids=str)
@pytest.mark.parametrize("columns", [256, 200])
def test_tilegym_softmax(tilegym: Callable[[str], Any], flags: dict[str, bool], columns: int) -> None:
    x = draw(9, columns)
    close(tilegym("softmax").softmax(x, **flags), torch.softmax(x.double(), -1), 1e-5, 1e-6)


@pytest.mark.parametrize("mode", ["static_persistent", "multi_wave_reload", "multi_wave_cached"])
def test_tilegym_rms_norm(tilegym: Callable[[str], Any], mode: str) -> None:
    x, weight = draw(12, 128), draw(128, seed=1)
    want = x.double() * torch.rsqrt(x.double().square().mean(-1, keepdim=True) + 1e-5) * weight.double()
    close(tilegym("rms_norm").rms_norm(x, (128,), weight, 1e-5, mode=mode), want, 1e-4, 1e-5)


def test_tilegym_layer_norm(tilegym: Callable[[str], Any]) -> None:
    x, weight, bias = draw(8, 128), draw(128, seed=1), draw(128, seed=2)
    want = torch.nn.functional.layer_norm(x.double(), (128,), weight.double(), bias.double(), 1e-5)
    got = tilegym("layer_norm_legacy").persistent_layer_norm(x, (128,), weight, bias, 1e-5)
    close(got[0], want, 1e-2, 1e-2)  # it rounds to bfloat16, whatever the input's type


@pytest.mark.parametrize("persistent", [False, True])
def test_tilegym_products(tilegym: Callable[[str], Any], persistent: bool) -> None:
    a, b = draw(100, 96, dtype=torch.float16), draw(96, 72, dtype=torch.float16, seed=1)
    close(tilegym("matmul").matmul(a, b, static_persistent=persistent), a.double() @ b.double())
    a, b = draw(3, 40, 64, dtype=torch.float16), draw(3, 64, 48, dtype=torch.float16, seed=1)
    close(tilegym("bmm").bmm(a, b, static_persistent=persistent), a.double() @ b.double())


def test_tilegym_grouped_products(tilegym: Callable[[str], Any]) -> None:
    xs = [draw(40, 64, dtype=torch.float16), draw(24, 64, dtype=torch.float16, seed=1)]
    ys = [draw(64, 48, dtype=torch.float16, seed=2), draw(64, 32, dtype=torch.float16, seed=3)]
    for got, x, y in zip(tilegym("group_gemm").group_gemm(xs, ys), xs, ys, strict=True):
        close(got, x.double() @ y.double())


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("keys", [128, 100])
def test_tilegym_attention(tilegym: Callable[[str], Any], causal: bool, keys: int) -> None:
    q, k, v = (draw(1, h, keys, 64, dtype=torch.float16, seed=i) for i, h in enumerate((4, 2, 2)))
    got = tilegym("attention").tile_fmha(q, k, v, scaling=0.125, is_causal=causal)
    close(got, attention(q, k, v, 0.125, causal))


def test_tilegym_attention_decode(tilegym: Callable[[str], Any]) -> None:
    q, k, v = (draw(2, h, s, 64, dtype=torch.float16, seed=i) for i, (h, s) in enumerate(((8, 1), (2, 300), (2, 300))))
    got = tilegym("flash_decode").fmha_decode(q, k, v, 0.125)
    close(got.reshape(q.shape), attention(q, k, v, 0.125))


def test_tilegym_mla_prefill(tilegym: Callable[[str], Any]) -> None:
    q, k, v = (draw(1, h, 128, 128, dtype=torch.bfloat16, seed=i) for i, h in enumerate((2, 2, 2)))
    qpe, kpe = draw(1, 2, 128, 64, dtype=torch.bfloat16, seed=7), draw(1, 1, 128, 64, dtype=torch.bfloat16, seed=8)
    got = tilegym("mla").tile_mla(q, k, v, qpe, kpe, True, 192**-0.5)
    whole = torch.cat((k, kpe.expand(1, 2, 128, 64)), -1)
    close(got, attention(torch.cat((q, qpe), -1), whole, v, 192**-0.5, causal=True))


@pytest.mark.parametrize("split", [False, True])
def test_tilegym_mla_decode(tilegym: Callable[[str], Any], split: bool) -> None:
    q, qpe = draw(2, 16, 512, dtype=torch.bfloat16), draw(2, 16, 64, dtype=torch.bfloat16, seed=1)
    kv, kpe = draw(2, 384, 512, dtype=torch.bfloat16, seed=2), draw(2, 384, 64, dtype=torch.bfloat16, seed=3)
    if split:
        got = tilegym("mla_decoding_split_kv").mla_decoding_split_kv(q, qpe, kv, kpe, 192**-0.5, 128)
    else:
        got = tilegym("mla_decoding").mla_decoding(q, qpe, kv, kpe, 192**-0.5)
    got = got[0] if isinstance(got, tuple) else got
    keys = torch.cat((kv, kpe), -1)[:, None]
    want = attention(torch.cat((q, qpe), -1)[:, :, None], keys, kv[:, None], 192**-0.5)
    close(got, want.squeeze(2))


def test_tilegym_activations(tilegym: Callable[[str], Any]) -> None:
    a, b = draw(6, 256, dtype=torch.float16), draw(6, 256, dtype=torch.float16, seed=1)
    want = torch.nn.functional.silu(a.double()) * b.double()
    close(tilegym("swiglu").swiglu(a, b), want)
    close(tilegym("silu_and_mul").silu_and_mul(torch.cat((a, b), -1)), want)


def test_every_tilegym_kernel_compiles_to_steps(tilegym: Callable[[str], Any]) -> None:
    """Modules of the checkout load, and hold kernels: what they are made of is known to the interpreter."""
    names = ("attention", "flash_decode", "mla", "mla_decoding", "rms_norm", "softmax", "matmul", "bmm", "group_gemm")
    for name in names:
        assert any(type(v).__name__ == "kernel" for v in vars(tilegym(name)).values()), name


# ---------------------------------------------------------------- cutile-python
@pytest.fixture
def upstream(pretended_gpu: None, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Any]:
    monkeypatch.syspath_prepend(str(_checkout("MLA_VAR3_CUTILE_PYTHON", "test")))

    def load(name: str) -> Any:
        for loaded in [m for m in sys.modules if m == "kernels" or m.startswith("kernels.")]:
            monkeypatch.delitem(sys.modules, loaded)
        return importlib.import_module(f"kernels.{name}")

    return load


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("keys", [64, 63])
def test_upstream_attention(upstream: Callable[[str], Any], causal: bool, keys: int) -> None:
    module = upstream("attention")
    q, k, v = (draw(1, h, keys, 64, seed=i) for i, h in enumerate((4, 2, 2)))

    def run(poison: bool) -> torch.Tensor:
        out = torch.zeros_like(q)
        arguments = (q, k, v, out, 0.125, 0, 64, 4, 32, 32, 2, causal, keys % 32 == 0)
        cutile_cpu.launch((math.ceil(keys / 32), 4), module.fmha_kernel, arguments, poison=poison)
        return out

    close(run(poison=False), attention(q, k, v, 0.125, causal), 1e-4, 1e-4)
    if keys % 32:
        # It loads the last tile of V without a padding mode and multiplies what is there by zero.
        with pytest.warns(cutile_cpu.UndeterminedPadding, match="`v = ct.load"):
            assert torch.isnan(run(poison=True)).any()


def test_upstream_transpose(upstream: Callable[[str], Any]) -> None:
    module = upstream("transpose")
    kernels = [v for v in vars(module).values() if type(v).__name__ == "kernel"]
    assert kernels
    x, out = draw(48, 40), torch.zeros(40, 48)
    for kernel in kernels:
        names = list(kernel._annotated_function.pysig.parameters)
        if len(names) != 4:
            continue
        cutile_cpu.launch((3, 3), kernel, (x, out, 16, 16))
        assert torch.equal(out, x.T)


def test_upstream_products(upstream: Callable[[str], Any]) -> None:
    module = upstream("matmul")
    a, b = draw(80, 96), draw(96, 48, seed=1)
    out = torch.zeros(80, 48)
    cutile_cpu.launch((3 * 2,), module.matmul_kernel, (a, b, out, 32, 32, 32))
    close(out, a.double() @ b.double())  # it multiplies tfloat32
    batch = torch.zeros(2, 80, 48)
    many = torch.stack((a, a * 2)), torch.stack((b, b + 1))
    cutile_cpu.launch((2, 3, 2), module.batch_matmul_kernel, (*many, batch, 32, 32, 32))
    close(batch, many[0].double() @ many[1].double(), 2e-2, 5e-2)


@pytest.mark.parametrize("seed", [None, 3])
def test_upstream_split_k_with_locks(upstream: Callable[[str], Any], seed: int | None) -> None:
    """Blocks that take turns through a lock, and the last one to come clears it."""
    module = upstream("matmul")
    a, b, out = draw(64, 128), draw(128, 64, seed=1), torch.zeros(64, 64)
    locks, counts = torch.zeros(4, dtype=torch.int32), torch.zeros(4, dtype=torch.int32)
    cutile_cpu.launch((4, 4), module.matmul_split_k_kernel, (a, b, out, locks, counts, 32, 32, 32, 4), seed=seed)
    close(out, a.double() @ b.double())


def test_upstream_layer_norm(upstream: Callable[[str], Any]) -> None:
    module = upstream("layer_norm")
    x, weight, bias, out = draw(5, 96), draw(96, seed=1), draw(96, seed=2), torch.zeros(5, 96)
    mean, rstd = torch.zeros(5), torch.zeros(5)
    cutile_cpu.launch((5,), module.layer_norm_fwd, (x, weight, bias, out, mean, rstd, 1e-5, 32))
    close(out, torch.nn.functional.layer_norm(x.double(), (96,), weight.double(), bias.double(), 1e-5), 1e-4, 1e-5)
    close(mean, x.double().mean(1), 1e-5, 1e-6)


def test_upstream_rms_norms(upstream: Callable[[str], Any]) -> None:
    module = upstream("rms_norm")
    x, weight = draw(8, 128), draw(128, seed=1)
    want = x.double() * torch.rsqrt(x.double().square().mean(-1, keepdim=True) + 1e-5) * weight.double()
    for kernel in (module.rms_norm_kernel, module.rms_norm_kernel_gather):
        out, rstd = torch.zeros(8, 128), torch.zeros(8)
        cutile_cpu.launch((8,), kernel, (x, weight, out, rstd, 128, 1e-5, 64))
        close(out, want, 1e-4, 1e-5)
    out = torch.zeros(8, 128)
    cutile_cpu.launch((2,), module.rms_norm_kernel_static_persistent, (x, out, weight, 2, 128, 128, 1e-5))
    close(out, want, 1e-4, 1e-5)


def test_upstream_grouped_products(upstream: Callable[[str], Any]) -> None:
    module = upstream("group_gemm")
    xs, ys = [draw(40, 64), draw(33, 64, seed=1)], [draw(64, 48, seed=2), draw(64, 20, seed=3)]
    outs = [torch.zeros(40, 48), torch.zeros(33, 20)]
    cutile_cpu.launch((4,), module.grouped_matmul_kernel, (xs, ys, outs, 4, 32, 32, 32))
    for got, x, y in zip(outs, xs, ys, strict=True):
        close(got, x.double() @ y.double(), 1e-5, 1e-4)
