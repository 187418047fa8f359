"""Devices: the file is well-formed and sourced, look-ups answer, verdicts say why, occupancy follows CUDA's rules."""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
from importlib import resources
from types import SimpleNamespace

import pytest

from mla_var3.device import FEATURES, Device, Requirement, _from_properties
from mla_var3.errors import UserError, Verdict

CONF = resources.files("mla_var3").joinpath("conf")
DATA = json.loads(CONF.joinpath("devices.json").read_text(encoding="utf-8"))
SCHEMA = json.loads(CONF.joinpath("devices.schema.json").read_text(encoding="utf-8"))
KEYS = {"h100", "h800", "h200", "h20", "a100", "b200", "b300", "rtx5090", "rtx4090", "l40s", "a40", "rtxpro6000"}


def props(**over: object) -> SimpleNamespace:
    base = {
        "name": "NVIDIA H200",
        "major": 9,
        "minor": 0,
        "multi_processor_count": 132,
        "regs_per_multiprocessor": 65536,
        "shared_memory_per_multiprocessor": 233472,
        "shared_memory_per_block_optin": 232448,
        "max_threads_per_multi_processor": 2048,
        "L2_cache_size": 62914560,
        "total_memory": 150_000_000_000,
    }
    return SimpleNamespace(**{**base, **over})


def test_file_keeps_its_schema() -> None:
    jsonschema = pytest.importorskip("jsonschema", reason="pip install jsonschema (extra 'dev')")
    jsonschema.Draft202012Validator.check_schema(SCHEMA)
    jsonschema.Draft202012Validator(SCHEMA).validate(DATA)


def test_schema_refuses_a_figure_without_a_source() -> None:
    jsonschema = pytest.importorskip("jsonschema", reason="pip install jsonschema (extra 'dev')")
    broken = json.loads(json.dumps(DATA))
    del broken["devices"][0]["hbm_gbps"]["source"]
    with pytest.raises(jsonschema.ValidationError, match="'source' is a required property"):
        jsonschema.Draft202012Validator(SCHEMA).validate(broken)


def test_every_source_is_listed_and_every_listed_source_is_used() -> None:
    used = {limits["source"] for limits in DATA["architectures"].values()}
    for entry in DATA["devices"]:
        figures = [v for v in entry.values() if isinstance(v, dict) and "source" in v]
        used |= {f["source"] for f in [*figures, *entry["tflops"].values()]}
    assert used == set(DATA["sources"])


def test_a_device_whose_architecture_no_gpu_here_had_is_marked() -> None:
    marked = {d.key for d in Device.all() if d.mark}
    assert marked == KEYS - {"h100", "h800", "h200", "h20"}
    assert {Device.get(key).mark for key in marked} == {"compiled, never run"}


def test_all_devices_are_there_and_cite_every_figure() -> None:
    assert {d.key for d in Device.all()} == KEYS
    for device in Device.all():
        assert device.known
        for name in ("num_sms", "smem_per_block", "regs_per_sm", "l2_bytes", "hbm_gbps", "tflops.bf16"):
            assert "https://" in device.sources[name], (device.key, name)
        assert pickle.loads(pickle.dumps(device)) == device
        assert len({device, Device.get(device.key)}) == 1


def test_h200() -> None:
    h200 = Device.get("h200")
    assert (h200.arch, h200.sm_version, h200.num_sms) == ("sm_90a", (9, 0), 132)
    assert (h200.smem_per_block, h200.smem_per_sm, h200.regs_per_sm) == (232_448, 233_472, 65_536)
    assert (h200.hbm_gbps, h200.tflops["bf16"]) == (4800, 989.5)
    assert h200.ceiling("matmul_tflops", "burst").value == 803
    assert h200.ceiling("matmul_tflops", "sustained").value == 683
    assert h200.ceiling("read_gbps", "burst").value == h200.ceiling("read_gbps", "sustained").value == 4640
    assert h200.ceiling("copy_gbps", "burst") is None


def test_consumer_blackwell_has_cuda_s_shared_memory_not_the_96_kb_of_other_texts() -> None:
    rtx = Device.get("rtx5090")
    assert (rtx.smem_per_sm, rtx.smem_per_block) == (100 * 1024, 99 * 1024)
    assert "96 KB" in rtx.sources["smem_per_sm"]


def test_unknown_key_names_the_nearest() -> None:
    with pytest.raises(UserError, match=r"no device 'h20O'.*did you mean 'h20"):
        Device.get("h20O")


@pytest.mark.parametrize(
    ("key", "feature", "reason"),
    [
        ("rtx5090", "tcgen05", "tcgen05 needs sm_100a or sm_103a; this is sm_120a"),
        ("b200", "wgmma", "wgmma needs sm_90a; this is sm_100a"),
        ("a100", "tma", "tma needs sm_90 or later; this is sm_80"),
        ("rtx5090", "tma", ""),
        ("b300", "tcgen05", ""),
        ("h20", "wgmma", ""),
        ("rtx4090", "fp8", ""),
    ],
)
def test_features(key: str, feature: str, reason: str) -> None:
    verdict = Device.get(key).can_run(Requirement(archs=(), features=(feature,)))
    assert (bool(verdict), verdict.reason) == (not reason, reason)


def test_requirement_on_architecture_dtype_and_problem() -> None:
    h200, b200 = Device.get("h200"), Device.get("b200")
    bf16 = SimpleNamespace(dtype="bf16", h=128)
    assert h200.can_run(Requirement(), bf16)
    assert b200.can_run(Requirement()).reason == "the kernel is written for sm_90a; this is sm_100a"
    assert b200.can_run(Requirement(archs=("sm_80+",)))
    assert Device.get("a100").can_run(Requirement(archs=()))
    verdict = h200.can_run(Requirement(), SimpleNamespace(dtype="fp8", h=128))
    assert verdict.reason == "the kernel takes bf16 or fp16; the problem is fp8"

    def few_heads(pd: SimpleNamespace) -> Verdict:
        return Verdict(pd.h <= 64, f"h is {pd.h}; the kernel takes at most 64")

    assert h200.can_run(Requirement(problem=few_heads), bf16).reason == "h is 128; the kernel takes at most 64"
    assert not h200.can_run(Requirement(problem=lambda pd: pd.h < 9), bf16)
    assert h200.can_run(Requirement(problem=few_heads))
    apart = SimpleNamespace(dtype="bf16", h=8, strided_pages=True)
    assert "contiguous caches; the problem's pages" in h200.can_run(Requirement(problem=few_heads), apart).reason
    assert h200.can_run(Requirement(problem=few_heads, options=("strided_pages",)), apart)
    with pytest.raises(UserError, match="did you mean 'wgmma'"):
        Requirement(features=("wgma",))
    assert all(FEATURES.values())


@pytest.mark.parametrize(
    ("registers", "smem", "threads", "ctas"),
    [
        (168, 227 * 1024, 384, 1),  # the shape of a warp-specialised Hopper kernel
        (168, 0, 384, 1),
        (176, 0, 384, 0),  # 12 warps of 176: one too many for the 64 K registers
        (32, 0, 1024, 2),
        (64, 0, 128, 8),
        (255, 0, 128, 2),
        (24, 0, 32, 32),  # the limit on CTAs
        (16, 113 * 1024, 128, 2),  # 1 KB more is reserved for each: 2 x 114 is exactly 228
        (16, 113 * 1024 + 1, 128, 1),
        (16, 228 * 1024, 128, 0),
        (16, 0, 2048, 0),
    ],
)
def test_occupancy(registers: int, smem: int, threads: int, ctas: int) -> None:
    assert Device.get("h200").ctas_per_sm(registers, smem, threads) == ctas


@pytest.mark.parametrize(("threads", "registers"), [(128, 255), (256, 255), (384, 168), (512, 128), (1024, 64)])
def test_registers_at_launch(threads: int, registers: int) -> None:
    h200 = Device.get("h200")
    assert h200.max_registers(threads) == registers
    assert h200.ctas_per_sm(registers, 0, threads) >= 1


def test_a_card_of_the_file_is_recognised() -> None:
    found = _from_properties(props())
    assert (found.key, found.known, found.hbm_gbps) == ("h200", True, 4800)
    assert _from_properties(props(name="NVIDIA H100 80GB HBM3")).key == "h100"
    b300 = _from_properties(props(name="NVIDIA B300 SXM6 AC", major=10, minor=3, multi_processor_count=148))
    assert (b300.key, b300.arch) == ("b300", "sm_103a")


@pytest.mark.parametrize(
    "over",
    [
        {"name": "NVIDIA H200 NVL"},
        {"name": "NVIDIA H200 MIG 1g.18gb", "multi_processor_count": 16},
        {"multi_processor_count": 60},
        {"name": "NVIDIA GeForce RTX 5090 Laptop GPU", "major": 12, "multi_processor_count": 82},
    ],
)
def test_any_other_card_gets_the_driver_s_limits_and_no_peaks(over: dict[str, object]) -> None:
    found = _from_properties(props(**over))
    assert not found.known
    assert (found.hbm_gbps, dict(found.tflops), found.measured) == (None, {}, ())
    assert found.num_sms == props(**over).multi_processor_count
    assert found.smem_per_block == 232_448
    assert found.key and found.key == found.key.lower() and " " not in found.key


def test_an_unlisted_architecture() -> None:
    found = _from_properties(props(name="NVIDIA RTX A6000", major=8, minor=6, shared_memory_per_block_optin=101376))
    assert (found.key, found.arch, found.max_ctas_per_sm) == ("rtx-a6000", "sm_86", 16)
    assert found.can_run(Requirement(features=("wgmma",))).reason == "wgmma needs sm_90a; this is sm_86"


def test_detect_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert Device.detect() is None


def test_detect_asks_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: props())
    found = Device.detect()
    assert found is not None and found.key == "h200"
    with pytest.raises(UserError, match="no GPU 3: torch sees 1"):
        Device.detect(3)


def test_import_is_light() -> None:
    heavy = "torch numpy pydantic pandas cutlass triton cuda hydra rich"
    code = (
        "import sys, mla_var3.device as d; d.Device.get('h200');"
        f"print(sorted(set('{heavy}'.split()) & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
