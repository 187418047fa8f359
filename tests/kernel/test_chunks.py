"""What both ways to attend to a cached prefix are made of (`mla_var3.kernel.chunks`): pieces, gathered rows, merges,
and the pipelines with versions that a CPU runs in place of those in CuTe DSL."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from mla_var3.check.judge import check, compare  # noqa: E402
from mla_var3.device import Device, Requirement  # noqa: E402
from mla_var3.errors import UserError  # noqa: E402
from mla_var3.kernel import chunks  # noqa: E402
from mla_var3.runtime import KernelPlan  # noqa: E402
from mla_var3.toolchain.triton_ import compile_triton  # noqa: E402
from mla_var3.workload import chunked_prefill  # noqa: E402
from mla_var3.workload.chunked_prefill import ChunkedProblem, make_inputs  # noqa: E402
from running import in_tritons_interpreter  # noqa: E402

SMALL: dict[str, Any] = {"k": 32, "p": 8, "d": 16, "page": 4}
PAIRS = ((5, 5), (9, 30), (0, 12), (1, 17), (17, 40))
PROBLEM = ChunkedProblem(b=5, h=2, lengths=PAIRS, **SMALL)
TOKEN = (2 * 16 + 8) * 2 * 2  # bytes of keys and values of PROBLEM


@pytest.mark.parametrize(("prefix", "new", "most"), [(0, 5, 3), (10, 5, 100), (10, 5, 15), (10, 5, 14), (70, 9, 16)])
def test_pieces_hold_every_token_once(prefix: int, new: int, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunks, "PIECE_BYTES", most * 7 + 3)
    *ahead, last = chunks.pieces(prefix, new, 7)
    begin = 0
    for piece in ahead:
        assert piece.first == begin and not piece.own and piece.end is not None
        assert 0 < piece.rows == piece.end - piece.first <= most
        begin = piece.end
    assert last.own and last.first == begin and last.rows == prefix - begin + new
    assert last.rows <= max(most, new)
    assert len(ahead) == 0 or prefix + new > most


def test_gathered_rows_are_those_of_the_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows behind the last key are left alone; pages that no request has hold NaN."""
    monkeypatch.setattr(chunks, "PIECE_BYTES", 30 * TOKEN)
    x = chunked_prefill.named(make_inputs(PROBLEM, seed=1))
    whole = [x["kv_cache"][x["page_table"][i, : -(-t // 4)].long()].flatten(0, 1)[:t] for i, (_, t) in enumerate(PAIRS)]
    prefixes = torch.cat([rows[: t - s] for rows, (s, t) in zip(whole, PAIRS, strict=True)])
    found = []
    for piece in chunks.cut(PROBLEM):
        latents, keys = torch.full((piece.rows + 3, 32), 7.0).bfloat16(), torch.zeros(piece.rows + 3, 2, 24).bfloat16()
        of_k = torch.full((6,), -1, dtype=torch.int32)
        chunks.gather(
            x["kv_cache"], x["page_table"], x["seq_lens"], x["cu_seqlens_q"], piece, latents, keys, of_k
        )  # fmt: skip
        rows = torch.cat([latents[: of_k[-1]], keys[: of_k[-1], 1, 16:]], 1)
        if not piece.own:
            assert of_k[-1] == piece.rows
            found.append(rows)
            continue
        last = torch.cat(found).shape[0]
        at = 0
        for i, (s, t) in enumerate(PAIRS):
            count = int(of_k[i + 1] - of_k[i])
            assert torch.equal(rows[of_k[i] : of_k[i + 1]], whole[i][t - count :])
            at += t - s
            assert count == s + min(t - s, max(0, at - last))
    assert torch.equal(torch.cat(found), prefixes[: len(torch.cat(found))])


def test_merging_is_attention_over_both_parts() -> None:
    torch.manual_seed(0)
    h, d = 3, 8
    q, k, v = torch.randn(4, h, d), torch.randn(9, h, d), torch.randn(9, h, d)

    def over(keys: slice) -> tuple[Any, Any]:
        scores = torch.einsum("qhd,khd->hqk", q, k[keys])
        return torch.einsum("hqk,khd->qhd", scores.softmax(-1), v[keys]).contiguous(), scores.logsumexp(-1)

    first, second, want = over(slice(0, 5)), over(slice(5, 9)), over(slice(0, 9))
    first[0][1], first[1][:, 1] = 0.0, float("inf")  # a row that saw no key, as some libraries write it
    second[0][2], second[1][:, 2] = 0.0, -float("inf")
    first[0][3] = second[0][3] = 0.0
    first[1][:, 3], second[1][:, 3] = float("inf"), -float("inf")
    given = [x.clone() for x in (*first, *second)]
    out, lse = total = torch.full_like(first[0], torch.nan), torch.full_like(first[1], torch.nan)
    chunks.merge(first, second, total)
    assert all(map(torch.equal, (*first, *second), given))
    assert torch.allclose(out[0], want[0][0]) and torch.allclose(lse[:, 0], want[1][:, 0])
    assert torch.allclose(out[1], second[0][1]) and torch.allclose(lse[:, 1], second[1][:, 1])
    assert torch.allclose(out[2], first[0][2]) and torch.allclose(lse[:, 2], first[1][:, 2])
    assert bool((out[3] == 0).all()) and bool((lse[:, 3] == -float("inf")).all())
    first[1][0, 0] = torch.nan
    chunks.merge(first, second, total)
    assert bool(out[0, 0].isnan().all() and lse[0, 0].isnan()) and bool(out[0, 1:].isfinite().all())


def test_the_kernels_do_as_torch_does() -> None:
    """Both leaf primitives in Triton's interpreter, beside what torch computes."""
    assert in_tritons_interpreter(__file__).split() == ["pieces", "10", "merges", "4"]


def accesses(ttir: str) -> tuple[set[str], set[str]]:
    """The pointers among a kernel's arguments that are loaded from, and those that are stored to."""
    of: dict[str, str] = {}  # value -> argument that it points into
    found: dict[str, set[str]] = {"load": set(), "store": set()}
    for line in ttir.splitlines():
        if "tt.func" in line:
            of.update({f"%{name}": name for name in re.findall(r"%(\w+): !tt\.ptr", line)})
        elif made := re.match(r"\s*(%\w+) = tt\.(?:splat|addptr|broadcast|expand_dims|reshape) (%\w+)", line):
            if made[2] in of:
                of[made[1]] = of[made[2]]
        elif access := re.search(r"\btt\.(load|store) (%\w+)", line):
            found[access[1]].add(of[access[2]])
    return found["load"], found["store"]


@pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION")
def test_no_program_writes_what_another_warp_of_it_may_still_read(tmp_path: Path) -> None:
    """Triton loads small tensors in several warps, and puts no barrier between such a load and a store to the same
    memory. So neither kernel loads from a pointer that it stores to."""
    from mla_var3.kernel.triton.prims import rows

    of_cache = dict.fromkeys(("b", "first", "end", "rows", "width", "pages"), "i32")
    pointers = {"Cache": "*bf16", "Table": "*i32", "Lens": "*i32", "OfQ": "*i32", "Latents": "*bf16", "Keys": "*bf16"}
    sizes = {"PAGE": 64, "K": 512, "P": 64, "D": 128, "LATENT_COLUMNS": 512, "ROPE_COLUMNS": 64, "REQUESTS": 8}
    kernels = [
        (
            rows.merge_rows,
            {"First": "*bf16", "FirstLse": "*fp32", "Second": "*bf16", "SecondLse": "*fp32", "Out": "*bf16",
             "Lse": "*fp32", **dict.fromkeys(("n", "first_stride", "second_stride", "stride"), "i32")},
            {"H": 128, "D": 128, "COLUMNS": 128, "ROWS": 4, "INTERPRET": False},
            {"Out", "Lse"},
        ),
        (
            rows.gather_rows, {**pointers, "OfK": "*i32", **of_cache, "page_stride": "i64"},
            {**sizes, "OWN": True, "H": 128, "ROWS": 8}, {"Latents", "Keys", "OfK"},
        ),
    ]  # fmt: skip
    for kernel, signature, constexprs, written in kernels:
        made = compile_triton(
            kernel, signature, constexprs, device=Device.get("h200"), out_dir=tmp_path, keep=("ttir",)
        )  # fmt: skip
        loaded, stored = accesses(made.artefacts["ttir"].read_text())
        assert stored == written and not loaded & stored


@dataclass(frozen=True)
class TorchTiling(chunks.DecompressTiling):
    causal: str = "torch/flash_attention"
    full: str = "torch/flash_attention"


class TorchPlan(KernelPlan):
    """The pipeline with attention in torch."""

    workload = chunked_prefill.WORKLOAD
    tiling_type = TorchTiling
    parts = ("torch/flash_attention",)
    requires = Requirement()

    def default_tiling(self) -> TorchTiling:
        return TorchTiling()

    def autotune_configs(self) -> list[Any]:
        return []

    def plan(self, *inputs: Any) -> Any:
        return chunks.decompressed(self, inputs)

    def plan_empty(self) -> Any:
        return chunks.empty(self, "torch")


@pytest.fixture
def poisoned_merges(monkeypatch: pytest.MonkeyPatch) -> None:
    """Merges write over NaN, which they would read if that were a part of theirs."""
    real = chunks.merge

    def merge(*parts: Any) -> None:
        for x in parts[-1]:
            x.fill_(torch.nan)
        real(*parts)

    monkeypatch.setattr(chunks, "merge", merge)


@pytest.mark.usefixtures("poisoned_merges")
@pytest.mark.parametrize("most", [1000, 41, 16])
def test_the_pipeline_is_the_oracle(most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunks, "PIECE_BYTES", most * TOKEN)
    inputs = make_inputs(PROBLEM, seed=3)
    kernel = TorchPlan(PROBLEM).plan(*inputs)
    names = [stage.name for stage in kernel.stages]
    assert (names.count("merge"), names.count("gather")) == {1000: (0, 1), 41: (2, 3), 16: (5, 6)}[most]
    report = compare(
        chunked_prefill.WORKLOAD, kernel(), chunked_prefill.reference(PROBLEM, *inputs),
        chunked_prefill.WORKLOAD.bounds("normal"),
    )  # fmt: skip
    assert report.ok, report.reason


def test_the_pipeline_passes_its_check(monkeypatch: pytest.MonkeyPatch) -> None:
    """In every case, with lengths that change under it among them."""
    monkeypatch.setattr(chunks, "PIECE_BYTES", 30 * TOKEN)
    report = check(TorchPlan(PROBLEM), device="cpu")
    assert report.ok, report.reason
    assert {case.name for case in report.cases} == set(chunked_prefill.CASES)


def test_the_check_finds_a_mask_that_is_one_token_off(monkeypatch: pytest.MonkeyPatch) -> None:
    real = chunks.gather

    def short(cache: Any, table: Any, lens: Any, *rest: Any) -> None:
        real(cache, table, lens - 1, *rest)

    monkeypatch.setattr(chunks, "gather", short)
    assert not check(TorchPlan(PROBLEM), device="cpu").ok


def test_a_version_that_is_not_declared_is_refused() -> None:
    class Other(TorchPlan):
        parts = ()

    with pytest.raises(UserError, match=r"torch/flash_attention is no part of Other"):
        Other(PROBLEM).plan(*make_inputs(PROBLEM))


def interpreted() -> None:
    """Compares what Triton's interpreter computes with torch."""
    count = 0
    for pairs, most in ((PAIRS, 16), (((4, 4),), 100), (((3, 90),), 50), (((0, 0), (2, 9)), 100)):
        problem = PROBLEM.replace(b=len(pairs), lengths=pairs)
        chunks.PIECE_BYTES = most * TOKEN
        x = chunked_prefill.named(make_inputs(problem, seed=count))
        lists = (x["kv_cache"], x["page_table"], x["seq_lens"], x["cu_seqlens_q"])
        for piece in chunks.cut(problem):
            made = []
            for gather in (chunks.gather, chunks._gather_by_kernel):
                latents = torch.full((piece.rows, 32), 7.0).bfloat16()
                keys = torch.full((piece.rows, 2, 24), 7.0).bfloat16()
                of_k = torch.full((len(pairs) + 1,), -1, dtype=torch.int32)
                gather(*lists, piece, latents, keys, of_k)
                made.append((of_k, latents[: of_k[-1]], keys[: of_k[-1]]))
                assert gather is chunks.gather or bool((latents[of_k[-1] :] == 7).all())
            assert all(map(torch.equal, *made))
            count += 1
    print("pieces", count)
    merges = 0
    for dtype in (torch.bfloat16, torch.float16):
        for n, h, d in ((5, 3, 24), (1, 2, 16)):
            outs, sums = torch.randn(2, n, h, d).to(dtype), torch.randn(2, h, n + 4) * 3
            parts = [(outs[0], sums[0, :, :n].contiguous()), (outs[1], sums[1, :, 2 : n + 2])]
            (out, lse), (part, other) = parts
            lse[0, 0], other[0, 0], lse[1, 0] = float("inf"), -float("inf"), -float("inf")
            out[0, 0] = part[0, 0] = out[0, 1] = 0.0
            if n > 2:
                other[2, 2] = torch.nan
            made = []
            for merge in (chunks.merge, chunks._merge_by_kernel):
                made.append((torch.zeros_like(out), torch.zeros(h, n + 3)[:, 1 : n + 1]))
                merge(*parts, made[-1])
            assert all(
                torch.allclose(a.float(), b.float(), 1e-2, 1e-3, equal_nan=True) for a, b in zip(*made, strict=True)
            )
            merges += 1
    print("merges", merges)


if __name__ == "__main__":
    interpreted()
