"""A machine without a GPU stands in for one: wrappers that ask for a GPU, and test suites that want one."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import cuda.tile as ct
import pytest
import torch
from cuda.tile.tune import exhaustive_search

from mla_var3 import cutile_cpu
from mla_var3.cutile_cpu.errors import Misuse

Const = ct.Constant[int]
REAL = (ct.launch, exhaustive_search, torch.cuda.current_stream, torch.cuda.is_available, torch.Generator)


@ct.kernel
def _double(x, out, n: Const):
    ct.store(out, (ct.bid(0),), ct.load(x, (ct.bid(0),), (n,)) * 2)


def double(x: torch.Tensor) -> torch.Tensor:
    """A wrapper as projects have it: it wants a GPU, and asks it for its size."""
    if not x.is_cuda or x.device.type != "cuda":
        raise ValueError("x must be on the GPU")
    assert torch.cuda.get_device_properties(x.device).multi_processor_count > 0
    out = torch.empty_like(x, device=torch.device("cuda"))
    with torch.cuda.device(x.device):
        ct.launch(torch.cuda.current_stream(), (ct.cdiv(x.numel(), 16),), _double, (x, out, 16))
    torch.cuda.synchronize()
    return out


class Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return double(x)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        return double(gradients[0])


def test_wrappers_run_unchanged() -> None:
    with pytest.raises(ValueError, match="must be on the GPU"):
        double(torch.ones(32))
    made_here = torch.ones(32)
    with cutile_cpu.pretend_gpu():
        for x in (made_here, torch.ones(32, device="cuda"), torch.ones(32).to("cuda:0"), torch.ones(32).cuda()):
            assert torch.equal(double(x), 2 * torch.ones(32))
    assert (ct.launch, exhaustive_search, torch.cuda.current_stream, torch.cuda.is_available, torch.Generator) == REAL
    assert not made_here.is_cuda and made_here.device.type == "cpu"


def test_backward_passes_too() -> None:
    with cutile_cpu.pretend_gpu():
        x = torch.ones(32, device="cuda", requires_grad=True)
        Twice.apply(x).sum().backward()
        assert x.grad is not None and x.grad.tolist() == [2.0] * 32
        y = torch.ones(32, device="cuda", requires_grad=True)
        (gradient,) = torch.autograd.grad(Twice.apply(y).sum(), y)
        assert gradient.tolist() == [2.0] * 32
        torch.autograd.backward(Twice.apply(y).sum())
        assert y.grad is not None and y.grad.tolist() == [2.0] * 32


def test_tensors_are_on_the_gpu() -> None:
    with cutile_cpu.pretend_gpu():
        x = torch.rand(4, device="cuda", generator=torch.Generator(device="cuda").manual_seed(3))
        assert x.device == torch.device("cuda", 0) and x.get_device() == 0 and not x.is_cpu
        assert x.cuda() is x and x.to("cuda") is x and x.to(device=0) is x and x.to(0) is x
        for copy in (x.cpu(), x.to("cpu"), x.to(device=torch.device("cpu"))):  # as from a GPU
            assert copy is not x and copy.data_ptr() != x.data_ptr() and torch.equal(copy, x)
        assert x.to(torch.float64).dtype == torch.float64
        assert torch.tensor([1.0], device="cuda:0").pin_memory().is_cuda
        assert torch.empty(2, device="cuda", pin_memory=True).shape == (2,)
        assert torch.empty(2, device="meta").is_meta and not torch.empty(2, device="meta").is_cuda
        assert torch.nn.Linear(2, 2).cuda().to("cuda").weight.is_cuda
        assert isinstance(torch.default_generator, torch.Generator)
        with torch.device("cuda"):
            assert torch.zeros(2).is_cuda
        torch.set_default_device("cuda")
        assert torch.zeros(2).tolist() == [0.0, 0.0]
        torch.set_default_device(None)
        torch.cuda.manual_seed(7)
        first = torch.rand(3, device="cuda")
        torch.cuda.manual_seed_all(7)
        assert torch.equal(torch.rand(3, device="cuda"), first)


def test_torch_cuda_answers() -> None:
    with cutile_cpu.pretend_gpu(arch="sm_100", sms=7):
        assert torch.cuda.is_available() and torch.cuda.device_count() == 1 and torch.cuda.current_device() == 0
        assert torch.cuda.get_device_capability() == torch.cuda.get_device_capability("cuda") == (10, 0)
        properties = torch.cuda.get_device_properties(0)
        assert (properties.multi_processor_count, properties.major, properties.name) == (7, 10, "pretended sm_100")
        stream, event = torch.cuda.Stream(), torch.cuda.Event(enable_timing=True)
        with torch.cuda.stream(stream), torch.cuda.device(0):
            event.record(stream)
            stream.wait_event(event)
            torch.cuda.current_stream().wait_stream(stream)
        assert event.query() and stream.query() and math.isnan(event.elapsed_time(stream.record_event()))
        assert torch.cuda.memory_allocated() == 0 and torch.cuda.mem_get_info()[0] > 1 << 30
        with pytest.raises(Misuse, match="no CUDA graphs"):
            torch.cuda.CUDAGraph()

        from cuda.tile._compile import get_sm_arch

        assert get_sm_arch() == "sm_100"
    with pytest.raises(ValueError, match="give an architecture as sm_90"), cutile_cpu.pretend_gpu(arch="hopper"):
        pass


def test_data_types_of_the_pretended_architecture() -> None:
    @ct.kernel
    def copy(x, out):
        ct.store(out, (0,), ct.load(x, (0,), (16,)))

    with cutile_cpu.pretend_gpu(arch="sm_80"):
        x = torch.ones(16, device="cuda").to(torch.float8_e5m2)
        with pytest.raises(ct.TileError, match="not supported on sm_80"):
            ct.launch(torch.cuda.current_stream(), (1,), copy, (x, torch.empty_like(x)))


def test_launches_are_refused_as_cutile_does() -> None:
    x = torch.ones(16)
    with cutile_cpu.pretend_gpu():
        stream = torch.cuda.current_stream()
        wrong: list[tuple[tuple[Any, ...], type[Exception]]] = [
            ((None, (1,), _double, (x, x, 16)), TypeError),
            (("stream", (1,), _double, (x, x, 16)), TypeError),
            ((stream, [1], _double, (x, x, 16)), TypeError),
            ((stream, (1,), _double, [x, x, 16]), TypeError),
            ((stream, (1,), double, (x, x, 16)), TypeError),
            ((stream, (1,), _double, (x, x)), TypeError),
            ((stream, (1,) * 4, _double, (x, x, 16)), ValueError),
            ((stream, (-1,), _double, (x, x, 16)), OverflowError),
        ]
        for arguments, error in wrong:
            with pytest.raises(error) as raised:
                ct.launch(*arguments)
            assert isinstance(raised.value, Misuse)
        with pytest.raises(RuntimeError, match="no keyword argument speed"):
            ct.launch(stream, (1,), _double, (x, x, 16), speed=1)
        with pytest.raises(TypeError, match="True or False"):
            ct.launch(stream, (1,), _double, (x, x, 16), programmatic_dependent_launch=1)
        ct.launch(0, (1,), _double, (x, x, 16), programmatic_dependent_launch=True)
    assert x.tolist() == [2.0] * 16


def test_a_search_takes_the_first_configuration_that_compiles() -> None:
    x, out = torch.ones(32), torch.zeros(32)
    with cutile_cpu.pretend_gpu():
        stream = torch.cuda.current_stream()

        def search(space: list[int]) -> Any:
            return exhaustive_search(space, stream, lambda n: (32 // n,), _double, lambda n: (x, out, n),
                                     lambda n: {"num_ctas": 1}, quiet=True)  # fmt: skip

        with pytest.warns(UserWarning, match=r"times nothing: for _double it took the first of 3 .* compiles, 16\."):
            result = search([12, 16, 8])  # tiles of 12 elements are no tiles
        assert result.best.config == 16 and math.isnan(result.best.mean_us) and result.best.num_samples == 0
        ((config, _, message),) = result.failures
        assert config == 12 and "power of" in message
        assert not out.any()  # nothing has run
        with pytest.raises(ValueError, match="search space compiles; the first, 12"):
            search([12])
        with pytest.raises(ValueError, match="has no configuration"):
            search([])


def test_signatures_come_from_tensors() -> None:
    from cuda.tile.compilation import CallingConvention, KernelSignature

    @ct.kernel
    def takes(x, many):
        pass

    with cutile_cpu.pretend_gpu():
        x = torch.ones(32, 1, device="cuda")
        for convention, static in (("v1", None), ("v2", 1)):
            version = getattr(CallingConvention, f"cutile_python_{convention}")()
            one, many = KernelSignature.from_kernel_args(takes, (x, [x]), version).parameters
            for made in (one, many.element):
                assert made.shape_constant == (None, static) and made.shape_divisible_by == (16, 1)


def test_functions_taken_before_and_inside_are_exchanged() -> None:
    before, inside = ModuleType("taken_before"), ModuleType("taken_inside")
    before.launch = ct.launch  # type: ignore[attr-defined]
    sys.modules |= {"taken_before": before, "taken_inside": inside}
    try:
        with cutile_cpu.in_place_of_launch():
            inside.launch = ct.launch  # type: ignore[attr-defined]
            assert before.launch is ct.launch is not REAL[0]
        assert before.launch is inside.launch is ct.launch is REAL[0]
    finally:
        del sys.modules["taken_before"], sys.modules["taken_inside"]


# ---------------------------------------------------------------- the plugin
CONFTEST = """
import pytest, torch

def pytest_addoption(parser):
    parser.addoption("--arch", default="sm%d%d" % torch.cuda.get_device_capability())
"""

SUITE = """
import time
import cuda.tile as ct
import pytest, torch
from cuda.tile import launch

@ct.kernel
def double(x, n: ct.Constant[int]):
    ct.store(x, (0,), ct.load(x, (0,), (n,)) * 2)

@ct.kernel
def divide(x):
    t = ct.load(x, (0,), (8,))
    ct.store(x, (0,), t // t)

def run(kernel, *arguments):
    launch(torch.cuda.current_stream(), (1,), kernel, arguments)

def test_right(request):
    x = torch.ones(8, device="cuda")
    run(double, x, 8)
    assert x.cpu().tolist() == [2.0] * 8
    assert request.config.getoption("--arch") == "sm100"

def test_wrong():
    x = torch.ones(8, device="cuda")
    run(double, x, 8)
    assert x.sum() == 8

def test_undefined():
    run(double, torch.ones(8, device="cuda")[:0], 8)
    x = torch.ones(6, device="cuda")
    run(double, x, 8)

def test_refused():
    run(divide, torch.ones(8, device="cuda", dtype=torch.uint8))

@pytest.mark.timeout(1)
def test_slow():
    time.sleep(30)

@pytest.mark.skip
def test_skipped():
    pass
"""


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "test_other.py").write_text(SUITE)
    return tmp_path


def _suite(repo_root: Path, checkout: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(repo_root / "scripts" / "cutile_suite.py"), str(checkout), *arguments]
    env = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST")}
    return subprocess.run(command, env=env, text=True, capture_output=True, timeout=200, check=False)


@pytest.mark.parametrize("workers", [[], ["-n", "1"]], ids=["alone", "xdist"])
def test_a_suite_runs_under_the_plugin(repo_root: Path, checkout: Path, workers: list[str]) -> None:
    done = _suite(repo_root, checkout, "--cutile-arch", "sm_100", *workers)
    table = done.stdout[done.stdout.index("cuTile on a CPU") :].splitlines()
    assert table[1].split() == ["passed", "failed", "refused", "too", "slow", "skipped"]
    assert table[2].split() == ["2", "1", "1", "1", "1", "test_other.py"]
    assert table[3].split() == ["2", "1", "1", "1", "1", "in", "all"]
    assert any("refused: UnsupportedOperation" in line and "`//` of uint8" in line for line in table)
    assert any("1 x too slow: Failed: Timeout" in line for line in table)
    assert done.returncode == 1


def test_a_wrong_call_of_the_script_is_one_sentence(repo_root: Path, tmp_path: Path) -> None:
    done = _suite(repo_root, tmp_path / "nowhere")
    assert done.returncode == 2 and "is no folder: give the checkout" in done.stderr
    assert "Traceback" not in done.stderr
