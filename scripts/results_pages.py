#!/usr/bin/env python3
"""Writes docs/results/ from record files: a page an experiment, and one for each further device.

The pages cite no records: a test makes them again from the files that they name, and compares. The words of the page
about vLLM stand in scripts/serve_vllm.md.

scripts/results_pages.py            # after a sweep: name its file in `FILES`

The board of dates names none: it has a row for each file of `experiment=nightly` in `results/`.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import re
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from mla_var3 import workload
from mla_var3.catalogue import registry, spoken
from mla_var3.device import Device
from mla_var3.lab.devlog.segments import without_comments
from mla_var3.lab.devlog.tables import (
    against_libraries,
    cell,
    cell_names,
    comparison,
    grid,
    label,
    over_gpus,
    summary,
)
from mla_var3.lab.devlog.values import STATES
from mla_var3.lab.naming import cell_name
from mla_var3.lab.sweep.config import compose
from mla_var3.lab.sweep.plan import expand_cells
from mla_var3.record import Record, as_ratio, geometric_mean, load

ROOT = Path(__file__).resolve().parents[1]

#: Page -> what it shows.
WHAT = {
    "decode": (
        "All requests of a cell have the same length; heads and contexts are those of DeepSeek V3 "
        "(`experiment=decode`)."
    ),
    "tensor_parallel": (
        "Each GPU has the heads that tensor parallelism leaves it: 64, 32, 16 or 8 (`experiment=tensor_parallel`). "
        "All 128 heads on one GPU are on the page [decode](decode.md)."
    ),
    "query_rows": ("A request has 4 to 512 query rows, its query tokens times its heads (`experiment=query_rows`)."),
    "ragged": (
        "The requests of a cell differ in length, as they do on a server (`experiment=ragged`). The kernels here read "
        "the lengths on the device and are not told in advance how they differ."
    ),
    "unseen": (
        "The problems were drawn at random, from seeds that no earlier run had used when they were first drawn, so "
        "that no kernel was made for them (`experiment=unseen`)."
    ),
    "regime_map": (
        "An even grid of heads, requests, context and query tokens, which the map of the report is drawn from. Times "
        "are in burst only, and each is the median of three samples (`experiment=regime_map bench=map "
        "bench.sustained_rounds=0 bench.cross_check_ms=0`)."
    ),
    "sparse_decode": (
        "Attention reads only the tokens that indices name. The caches are packed FP8 ones in the layouts of DeepSeek "
        "V3.2 and V4 (`experiment=sparse_decode`). FlashMLA takes 64 or 128 heads, so queries with fewer heads are "
        "padded to 64 for it. FlashAttention-3 and FlashInfer read the same tokens from a bf16 cache, through a page "
        "table of single tokens, and take no attention sinks: the cells in which they stand are without sinks, all "
        "others have them, and `sink` stands behind a name that both kinds have. No cell here has contexts that are "
        "shorter than the number of indices, where the remaining indices are -1: `experiment=sparse_served` and "
        "`sparse_missing` have such cells."
    ),
    "sparse_served": (
        "Sparse decode with contexts as servers have them: many are shorter than a row of indices, the rest of which "
        "names no token (-1). FlashAttention-3 reads a bf16 cache through page tables of single tokens, takes no "
        "attention sinks and no layout v4, and is given the lengths of the rows; the kernels here and FlashMLA find "
        "out from the indices where a row ends (`experiment=sparse_served`)."
    ),
    "unseen_sparse": (
        "Problems of sparse decode that were drawn at random from six seeds, with contexts, heads, query tokens and "
        "page sizes that nobody tuned to (`experiment=unseen_sparse`, with `seed=60811`, `71101`, `93303`, `38113`, "
        "`50923` and `90217`). Each of the first four seeds had been used once with earlier code, and the last two "
        "were used only when the code was final. FlashAttention-3 reads the same tokens from a bf16 cache, as in "
        "`sparse_served`, and takes neither layout v4 nor attention sinks."
    ),
    "indexer_logits": (
        "Logits of the lightning indexer over contiguous keys in FP8, as prompts have them: the last query token sees "
        "all keys, and each token before it one key less (`experiment=indexer_logits`). DeepGEMM takes 32 or 64 heads, "
        "so 16 are padded to 32 for it."
    ),
    "indexer_paged": (
        "Logits of the lightning indexer over an index cache in FP8 (`experiment=indexer_paged`). DeepGEMM's metadata "
        "kernel is counted once a step of 61 layers."
    ),
    "unseen_indexer": (
        "Logits of the lightning indexer in problems that were drawn at random, from a seed that no earlier run had "
        "used (`experiment=unseen_indexer seed=31337`)."
    ),
    "prefill": (
        "Attention of prompts over decompressed heads: whole prompts, prompts of unequal lengths, and chunks behind a "
        "prefix (`experiment=prefill`). FlashAttention-3 and FlashAttention-4 were timed beside the kernels here."
    ),
    "unseen_prefill": (
        "Prompts that were drawn at random from seeds that no earlier run had used, with heads and widths of published "
        "models, whole prompts and chunks behind a prefix, of equal and unequal lengths (`experiment=unseen_prefill`, "
        "with `seed=61961`, `77347` and `74256`). FlashAttention-3 was timed beside what the dispatcher picked."
    ),
    "chunked_prefill": (
        "New tokens of a prompt that attend to a paged latent cache of earlier ones: a pipeline that decompresses the "
        "cached rows (`chunk_decompress`), one that attends in latent space (`chunk_absorb`), and the first one with "
        "FlashAttention-3 for its attention (`peer/fa3_chunked`), as engines have it (`experiment=chunked_prefill`)."
    ),
    "absorb_gemm": (
        "The two products per head that stand around absorbed attention, in DeepSeek V3's widths: queries into the "
        "latent space, and the latent output out of it (`experiment=absorb_gemm`)."
    ),
    "mla_layer": (
        "A decode step of one whole attention layer of DeepSeek V3, with its projections, beside the same layer with "
        "FlashMLA as its attention (`experiment=mla_layer`)."
    ),
}
#: Of pages of the indexer, whose limit is made of a product in bf16.
FP8_LIMIT = (
    "A product in FP8 may take half the time of one of cuBLAS in bf16, which the limit is made of, so that a kernel "
    "can have up to 200 % of the limit."
)
#: Of pages whose sustained times are of one turn, where calls are bound by memory and draw the power limit.
FIRST_TURN = (
    "A sustained time is of one turn of 0.3 seconds. Where a call over a cache has one or two query tokens and draws "
    "the power limit, the contender that had its turn first lost more in 12 of 14 cells, by up to 13 %: DeepGEMM "
    "in the records of 2026-11-28, and the kernel here in those of 2026-11-29 ([devlog](../../devlogs/mqa_logits/"
    "cute-dsl-v4.md#measured)). Differences below 13 % between sustained times of these cells mean nothing. In three "
    "cells of [indexer_paged](indexer_paged.md) with one query token, turns of both orders were timed later, after the "
    "clock had settled: the kernel here takes 3 % longer than DeepGEMM for 256 requests of 8,192 tokens and for 64 of "
    "65,536, and 4 % longer for 256 of 32,768 ([devlog](../../devlogs/mqa_logits/cute-dsl-v4.md"
    "#experiment-energy-of-one-query-token-and-two-consumers)). These records and turns are of one producer warp. "
    "Today's code has four in calls over 2,097,152 cached tokens and more, and in the same three cells takes 1 to 2 % "
    "less than DeepGEMM in one run, and 2 % more to as long on the bench "
    "([devlog](../../devlogs/mqa_logits/cute-dsl-v4.md"
    "#experiment-four-producer-warps))."
)
#: Calls of `unseen_indexer` of fewer FLOPs compute next to nothing.
EMPTY_FLOPS = 10**6
#: Page -> what its cells and columns are, where their names do not say it.
MORE = {
    "unseen": (
        " Of the 96 cells 72 had been timed with earlier code too, and the 24 of `seed=41927` were first drawn when "
        "the code was final."
    ),
    "sparse_decode": (
        " The tables have version 2 of the kernel, which the dispatcher picks. Version 1, which it picks on no device, "
        "is left out. FlashInfer took turns with version 1 alone, so that no row has it here. At the power limit it "
        "was faster than version 1 in one cell, 128 requests of two query tokens with 128 heads (`results/h200/"
        "2026-11-27-sparse_decode-bf16.jsonl`)."
    ),
    "sparse_served": (
        " The last word of a cell's name says how contexts are drawn. `uniform`: evenly from 1 to 65,536 tokens. "
        "`lognormal`: 1,024 tokens times e to the power of a normal variable with mean 0 and variance 1, up to 16,384 "
        "tokens. `short`: evenly from 1 to one less than the row has indices. "
        "`half_short`: so for one half of the requests, and evenly from there to 32,768 for the other. In layout v4 a "
        "row has 128 indices into a window, and 512 or 1024 into a second cache that has a quarter of the tokens. In "
        "13 cells queries and indices are views with gaps between their rows (strided), which a name says only where a "
        "cell without gaps has it too. No library here reads the caches of the two cells in layout v41, so that the "
        "geometric mean leaves them out."
    ),
    "unseen_sparse": (
        " Each problem has a length of its own, 256 to 65,536 tokens, which no name says, and the last word of a "
        "cell's name says how contexts are drawn up to that length. `uniform`: evenly from 1 token. `lognormal`: 1,024 "
        "tokens times e to the power of a normal variable with mean 0 and variance 1. `short`: evenly from 1 to the "
        "largest number of tokens that leaves a row of indices unfilled (where there is a second cache, the row of "
        "indices into that cache). `half_short`: so for one half of the requests, and evenly from there for the other. "
        "Where a name ends without such a word, each context has that length. Where a context has fewer tokens than a "
        "row has indices, the rest of the row names no token (-1). This is so in 10 of the 31 problems without such a "
        "word too: in `v32_b47_s8_h128_top1024` contexts have 568 tokens, and in `v32_b42_s1_h40_top2048` 629. In 35 "
        "of the 144 problems a share of the indices is made -1 besides, which a name does not say either: in "
        "`v32_b50_s8_h32_top1024_half_short` half of the indices that would name a token, at random places, and in "
        "`v32_b49_s3_h96_top2048_uniform` all indices of half of the query tokens. In 31 others a number that was "
        "drawn for each request says how many indices of its rows count, and all kernels are given these numbers. "
        "FlashAttention-3 is given only the indices that name a token and count, one behind another, and their number. "
        "Making these lists is not timed."
    ),
    "prefill": (
        " In a cell's name s are the query tokens of a request and t its keys, the prefix of a chunk among them. "
        "`causal` stands where a query sees no later key, and `d` is the number of columns of a value and `p` how "
        "many more a key has, named where they are not 128 and 64: `d128_p0` is 128/128, `d256_p0` 256/256, and "
        "`d128_p128` 256/128, for which FlashAttention-3 and FlashAttention-4 get values padded to the keys' width. "
        "With `normal` and `lognormal` requests have unequal lengths, of which s and t are the means. The "
        "fastest library is the one that is fastest in burst, so that the other one may be faster at the power limit: "
        "in `b1_s8192_h128_t8192_causal_d256_p0` FlashAttention-3 takes 0.4 % less time than version 12 there. The "
        "cells are timed with the code of today, and their sustained times are the mean of two turns in both orders. "
        "The devlog of [version "
        "23](../../devlogs/flash_attention/cute-dsl-v23.md#aims-that-are-missed) says which aims are missed, and why."
    ),
    "unseen_prefill": (
        " Each seed was new to the rules by which its versions were picked, and draws 24 cells. Three seeds before "
        "these, 24071, 53887 and 90017, had found cells in which version 1, and after it versions 12 and 18, were "
        "slower than FlashAttention-3, and the rules were changed after each of them (`results/h200`, "
        "`2026-11-29-unseen_prefill-24071.jsonl` and so on): [version "
        "22](../../devlogs/flash_attention/cute-dsl-v22.md) took most of these cells. Seed 61961 was drawn for the "
        "rules with it. In one of its cells, "
        "`b13_s615_h128_t7778_causal_mostly_empty_d128_p0`, version 18 was picked and had 0.950 of the speed of "
        "FlashAttention-3: the longest request has 528 query tokens behind 93,119 others, in query tiles of 128, 256 "
        "and 144 rows for each head, and in version 18 one of 128 rows fills half of a cluster. [Version "
        "23](../../devlogs/flash_attention/cute-dsl-v23.md), in which two heads share the cluster, is picked there "
        "now. Seeds 77347 and 74256 were drawn for the rules of today. "
        "Later all cells that version 18 or 23 is picked for were timed again. By then both versions had a release at "
        "their end, and version 23 computed the query tiles of a head side by side behind a long prefix. Tables and "
        "means have these later times, and the times as drawn are in [earlier "
        "runs](#earlier-runs-of-cells-that-were-timed-again). No cell is under 0.97 in either state; the least is "
        "0.975. "
        "Sustained times are of two turns in both orders."
    ),
    "chunked_prefill": (
        " `mla_chunk_prefill` attends in latent space below 240 new tokens of a request, and decompresses from there "
        "on. The FLOPs of a cell are those of decompressing and of attention over heads. Attention in latent space "
        "decompresses nothing, so that it passes 100 % of the limit with few new tokens. The cells of "
        "the file `-both` have the code of today, with version 23 of `flash_attention` in the pipeline, and their "
        "sustained times are of two turns in both orders. The three cells of the file `-first` are older: their "
        "sustained times are of one turn, and where a row names no version of `flash_attention` behind "
        "`chunk_decompress`, the pipeline had versions 1 and 0, which have left the tree. No row of the tables is of "
        "another file ([devlog](../../devlogs/chunk_decompress/cute-dsl-v0.md))."
    ),
    "indexer_logits": (
        " In the cell with logits in bf16 the run timed version 3, which is retired, so that the first table leaves it "
        f"out. {FP8_LIMIT}"
    ),
    "indexer_paged": (
        " In calls over less than 2,097,152 cached tokens one warp loads pages, and in all others four do where "
        "a query "
        "tile has at most 64 columns ([devlog](../../devlogs/mqa_logits/cute-dsl-v4.md)). L2 is made cold by "
        "calls that rotate over "
        "inputs of 280 MB and more, and not by a kernel that writes all of it. Where a request has one query "
        "tile, `mqa_logits_v4` lets its keys be the first to be evicted from L2. New keys then evict each other, and "
        "keys of an earlier turn may survive, so that with one or two query tokens a call may be faster here than "
        "behind other kernels. Sustained times of the six cells of one query token with 64 heads and up to 524,288 "
        "cached tokens are of one turn of 0.3 seconds, and the contender that had its turn first lost up to 13 % there "
        "([devlog](../../devlogs/mqa_logits/cute-dsl-v4.md#measured)). Those of the other cells are of two turns, in "
        f"both orders. {FP8_LIMIT}"
    ),
    "unseen_indexer": (
        " Where a request has three query tokens, the code of some records multiplied all at once, and today's does it "
        "in two parts. In some ragged cells almost no query token sees a key, so that an almost empty call is timed: "
        f"a second mean leaves out the calls of less than {EMPTY_FLOPS // 10**6} MFLOP, in one of which DeepGEMM takes "
        f"18 times as long. {FIRST_TURN} {FP8_LIMIT}"
    ),
}
#: Device -> experiment -> what its rows are there, on the page of a further device.
FURTHER = {
    "h100": {
        "sparse_decode": (
            " Rows of `cute-dsl/sparse_mla_v1` are of a version that the dispatcher no longer picks. It picks version "
            "2, which was hardly timed on this card."
        ),
    },
}
PACKED = "queries are in bf16, and caches are packed in FP8"
CODES = "queries and keys are in e4m3 with 128 columns"
HEADS = "everything is in bf16, and keys have 192 columns and values 128 where a name says nothing else"
TOKENS = "a cached token has 512 latent and 64 rope columns, and a page holds 64 tokens"
#: What is said of the tensors of pages whose dtypes, widths or caches are others than `DENSE`.
CACHES = {
    "sparse_decode": PACKED,
    "sparse_served": PACKED,
    "unseen_sparse": PACKED,
    "indexer_logits": f"{CODES}, and logits are in fp32 unless a name ends in bf16",
    "indexer_paged": f"{CODES}, logits are in fp32, and a page holds 64 tokens",
    "unseen_indexer": f"{CODES}, and logits are in fp32",
    "prefill": HEADS,
    "unseen_prefill": HEADS,
    "chunked_prefill": f"everything is in bf16, decompressed keys have 192 columns and values 128, {TOKENS}",
    "absorb_gemm": "everything is in bf16, heads have 128 columns, and the latent has 512",
    "mla_layer": f"everything is in bf16, a hidden state has 7168 columns, {TOKENS}",
}
DENSE = f"queries and caches are in bf16, {TOKENS}"
#: Pages of the first device alone.
ON_H200 = (
    "sparse_served",
    "unseen_sparse",
    "indexer_logits",
    "indexer_paged",
    "unseen_indexer",
    "prefill",
    "unseen_prefill",
    "chunked_prefill",
)
#: Device -> experiment -> its record files in results/, one or several, of which the newest record of a kernel and cell
#: counts. The first device has a page an experiment, the others one each.
FILES: dict[str, dict[str, str | tuple[str, ...]]] = {
    "h200": {
        **{name: f"h200/2026-11-26-{name}.jsonl" for name in WHAT},
        **{name: f"h200/2026-11-27-{name}.jsonl" for name in ("query_rows", "tensor_parallel", "mla_layer")},
        "unseen": ("h200/2026-11-30-unseen.jsonl", "h200/2026-11-30-unseen-41927.jsonl"),
        "decode": ("h200/2026-11-27-decode-evening.jsonl", "h200/2026-11-29-decode-clusters.jsonl"),
        "ragged": ("h200/2026-11-27-ragged.jsonl", "h200/2026-11-29-ragged-clusters.jsonl"),
        "regime_map": "h200/2026-11-28-regime_map.jsonl",
        "sparse_decode": (
            "h200/2026-11-26-sparse_decode.jsonl",
            "h200/2026-11-28-sparse_decode.jsonl",
            "h200/2026-11-28-sparse_decode-second.jsonl",
            "h200/2026-11-29-sparse_decode.jsonl",
            "h200/2026-11-29-sparse_decode-sinks.jsonl",
            "h200/2026-11-29-sparse_decode-copies.jsonl",
            "h200/2026-11-30-sparse_decode-fa3.jsonl",
        ),
        "sparse_served": (
            "h200/2026-11-28-sparse_served.jsonl",
            "h200/2026-11-29-sparse_served.jsonl",
            "h200/2026-11-29-sparse_served-copies.jsonl",
        ),
        "unseen_sparse": tuple(
            f"h200/2026-11-30-unseen_sparse-{seed}.jsonl" for seed in (60811, 71101, 93303, 38113, 50923, 90217)
        ),
        "indexer_logits": "h200/2026-11-28-indexer_logits.jsonl",
        "indexer_paged": (
            "h200/2026-11-28-indexer_paged-v4.jsonl",
            "h200/2026-11-29-indexer_paged.jsonl",
            "h200/2026-11-29-indexer_paged-four.jsonl",
        ),
        "unseen_indexer": (
            "h200/2026-11-28-unseen_indexer-31337.jsonl",
            "h200/2026-11-29-unseen_indexer-31337.jsonl",
        ),
        "prefill": (
            "h200/2026-11-28-prefill-v18.jsonl",
            "h200/2026-11-29-prefill.jsonl",
            "h200/2026-11-29-prefill-v23.jsonl",
            "h200/2026-11-29-prefill-both.jsonl",
        ),
        "chunked_prefill": tuple(
            f"h200/2026-11-29-chunked_prefill{word}.jsonl" for word in ("-first", "", "-splits", "-v23", "-both")
        ),
        "unseen_prefill": tuple(f"h200/2026-11-29-unseen_prefill-{seed}.jsonl" for seed in (61961, 77347, 74256)),
    },
    "h100": {
        **{name: f"h100/2026-11-26-{name}.jsonl" for name in WHAT if name not in ON_H200},
        **{name: f"h100/2026-11-27-{name}.jsonl" for name in ("decode", "ragged")},
        "unseen": ("h100/2026-11-27-unseen.jsonl", "h100/2026-11-27-unseen-88117.jsonl"),
        "regime_map": "h100/2026-11-28-regime_map.jsonl",
    },
}
MAIN, *OTHERS = FILES
#: Device -> the record files of scripts/context_parallel.py, one a number of GPUs.
OVER_GPUS = {
    "h200": ("h200/2026-11-26-context_parallel-four.jsonl", "h200/2026-11-26-context_parallel.jsonl"),
    "h100": ("h100/2026-11-25-context_parallel.jsonl",),
}

#: The record files that the board of dates has a row for each of.
NIGHTLY = "[0-9][0-9][0-9][0-9]-[0-9][0-9]-[0-9][0-9]-nightly.jsonl"
BOARD = (
    "One row a date: how the kernels that the dispatcher picks compare with the fastest library of the same run, in "
    "the cells of `experiment=nightly`. A column is a workload. If its figure has a number in brackets behind it, it "
    "is the geometric mean of the library's time over ours, in burst with a cold L2, over so many cells: those in "
    "which a library was timed. Above 1 the kernel here is faster. If it is a percentage, no library was timed for "
    "the workload, and it is the geometric mean of the shares of the cells' limits, which is no part of the column "
    "`all`. A dash is a workload that was not timed. Contenders of a cell took turns in one process. The column "
    "`cells` says in how many of the cells that the run had a kernel of this project passed its check and was timed; "
    "the experiment gains and loses cells from one date to another, and a run may end before its last cell. Each "
    "time is the median of three samples, so a mean of few cells may differ by a few per cent from one date to the "
    "next: `mla-var3 bench KERNEL --against COMMIT`, with the options of the cell that moved, measures with care "
    "whether a version lost."
)

HEAD = "<!-- Written by scripts/results_pages.py: change that, not this. -->\n"
#: What every page says of a time and a limit.
TIMED = (
    "The L2 cache is cold before every call. Burst is the time on a cool chip, and sustained is the time at the chip's "
    "power limit. The limit of a cell is the least time that two rates of the device leave for it: the larger of its "
    "FLOPs over the rate of a cuBLAS product and its bytes over the rate of a kernel that only reads. Both rates were "
    "measured in the same run. They are what these two kernels reached and no bounds of the hardware, so that a kernel "
    "can pass 100 %."
)
METHOD = (
    f"{TIMED} Unless something else is said, all contenders of a cell took turns in one process. A speedup above 1 "
    "means that the kernel here is faster than the library."
)
#: Behind METHOD where a table has such columns.
SHARED = (
    "Some libraries run a small kernel first that makes a schedule of the call's splits, and the 61 layers of a "
    "model's step can share that schedule. The columns `speedup` count one 61st of that kernel's time, as one layer's "
    "share, and the columns `scheduled in every call` count all of it, as a call that makes its own schedule takes."
)
#: What a library's records are named after: `peer/` and one of these words.
LIBRARIES = {
    "flash_mla_lib": "FlashMLA built from source",
    "flash_mla_sparse": "FlashMLA's sparse decode built from source",
    "flash_mla_layer": "a whole layer with FlashMLA as its attention",
    "fa3_qv": "FlashAttention-3",
    "fa3_sparse": "FlashAttention-3",
    "fa3": "FlashAttention-3",
    "fa3_chunked": "the pipeline with FlashAttention-3",
    "fa4": "FlashAttention-4",
    "flashinfer_fa3": "FlashInfer with its kernels for Hopper",
    "flashinfer_sparse": "FlashInfer",
    "deep_gemm": "DeepGEMM",
    "cublas_bmm": "`torch.bmm`, which calls cuBLAS",
}
#: How a cell's name is read.
CELLS = (
    "A cell is named after its problem: `b128_s1_h64_t4096` are 128 requests (b) of one query token (s) with 64 heads "
    "(h) and a context of 4096 tokens (t)."
)
LENGTHS = (
    "A word behind t says that the requests of a cell differ in the length of their contexts. `ragged`: evenly from 0 "
    "to t. `normal`: from a normal distribution with mean t and standard deviation t/2, up to 2t. `lognormal`: t times "
    "e to the power of a normal variable with mean 0 and variance 1, up to 16t. `bimodal`: every other request has t "
    "tokens, and the others up to t/16. `one_long`: one request has t, and the others up to t/64. `mostly_empty`: a "
    "quarter of the requests have 1 to t tokens, and the others none. `causal` stands where a query token sees no "
    "later token."
)
_SPARSE_NAMES = (
    "A cell is named after its problem: `v32_b2_s1_h8_top512` are 2 requests (b) of one query token (s) with 8 heads "
    "(h) over a cache in layout v32, where each query token has a row of 512 indices (top) and attends to the tokens "
    "that they name. In layout v4 `top128+1024` are 128 indices into one cache and 1024 into a second one."
)
_INDEXER_NAMES = (
    "A cell is named after its problem: `{}` are the logits of {} (s) of {} (b) with 64 indexer heads (h) for {} (t)."
)
#: Page -> how its cells' names are read, where `CELLS` does not fit.
NAMES = {
    "ragged": f"{CELLS} {LENGTHS}",
    "unseen": f"{CELLS} {LENGTHS}",
    "sparse_decode": _SPARSE_NAMES,
    "sparse_served": _SPARSE_NAMES,
    "unseen_sparse": _SPARSE_NAMES,
    "indexer_logits": _INDEXER_NAMES.format(
        "prefill_b1_s1024_h64_t131072", "1,024 query tokens", "one request", "131,072 keys that lie one behind another"
    ),
    "indexer_paged": _INDEXER_NAMES.format(
        "paged_b256_s1_h64_t8192", "one query token", "each of 256 requests", "8,192 keys of each in a paged cache"
    ),
    "unseen_indexer": _INDEXER_NAMES.format(
        "paged_b46_s3_h64_t25515", "three query tokens", "each of 46 requests", "25,515 keys of each in a paged cache"
    )
    + " `prefill` in place of `paged` are keys that lie one behind another, and `ragged` lengths that are drawn evenly "
    "from 0 to t.",
    "chunked_prefill": (
        "A cell is named after its problem: `b1_s512_h16_t4608` is one request (b) with 512 new tokens (s), 16 heads "
        "(h) and 4,608 tokens with the new ones (t), of which 4,096 are cached."
    ),
    "unseen_prefill": (
        "A cell is named after its problem: `b23_s231_h16_t1930_kv2_causal_ragged_d256_p0` are 23 requests (b) with "
        "231 query tokens (s) and 1,930 keys (t) in the mean, a prefix among the keys, and 16 query heads (h) on 2 kv "
        "heads (kv). In `causal` problems a query sees no later key. d is the number of columns of a value and p how "
        "many more a key has, named where they are not 128 and 64. The word behind `causal` is how requests differ in "
        "length. `ragged`: evenly from 0 to twice the mean. `normal`: the standard deviation is half of the mean. "
        "`lognormal`: e to the power of a normal variable with variance 1. `bimodal`: every other request is long, "
        "and the others have up to a sixteenth of it. `one_long`: one request is long, and the others have up to 1/64 "
        "of it. `mostly_empty`: a quarter of the requests have tokens."
    ),
    "absorb_gemm": (
        "A cell is named after its problem: `out_n512_h128` is the product behind attention for 512 query tokens (n) "
        "with 128 heads (h), and `q` in place of `out` the product in front of it."
    ),
    "mla_layer": (
        "A cell is named after its problem: `b32_h128_t4096` are 32 requests (b) of one query token with 128 heads (h) "
        "and a context of 4096 tokens (t)."
    ),
}

SEVERAL = (
    "Several GPUs of one host share the pages of long requests in turn, and are compared with one GPU in the same run. "
    "The column `exchange` says how they put their partial results together: `collective` is NCCL's all-to-all of the "
    "partials, `all_gather` NCCL's plain all-gather of them, and `symmetric` means that each GPU stores its partials "
    "into the other GPUs' memory. Times are those of the slowest rank, in burst and with a cold L2. What the 61 layers "
    "of a step share, the schedule and the counts of lengths, has one 61st of its time in the ratio. The model "
    "predicts a time from a straight line through two measured exchanges and from the dispatcher's prediction of what "
    "one rank decodes; the prediction was written down before the measurement, and the last column says whether it put "
    "the exchange ahead of one GPU."
)


@functools.cache
def records_in(file: str) -> list[dict[str, Any]]:
    return [{**record.model_dump(), "run": record.run} for record in load([ROOT / "results" / file]).records]


#: Device -> versions that its pages leave out: nothing picks them there, and they stay for another device's records.
LEFT_OUT = {"h200": ("cute-dsl/sparse_mla_v1",)}


@functools.cache
def recorded(device: str) -> tuple[dict[tuple[str, str], list[Record]], dict[str, str]]:
    """The records of a device that speak, by cell, and the file of each record by its id."""
    files = sorted((ROOT / "results" / device).rglob("*.jsonl"))
    found = {path.relative_to(ROOT / "results").as_posix(): load([path]).records for path in files}
    shown = (r for records in found.values() for r in records if r.kernel.label not in LEFT_OUT.get(device, ()))
    told = spoken.cells(spoken.speaking(shown))
    return told, {record.id: file for file, records in found.items() for record in records}


def files_of(device: str, name: str) -> tuple[str, ...]:
    """The record files of an experiment."""
    files = FILES[device][name]
    return (files,) if isinstance(files, str) else files


@functools.cache
def records_of(device: str, name: str, only: str = "") -> list[dict[str, Any]]:
    """What answers the cells of an experiment: in each cell the version that speaks for it (`catalogue.spoken`),
    whichever experiment timed it last, those that took turns with it, and the fastest library. only: the cells of one
    of its record files."""
    told, file_of = recorded(device)
    chosen = []
    files = [only] if only else files_of(device, name)
    for wanted in spoken.cells(load([ROOT / "results" / file for file in files]).records):
        block = told.get(wanted, [])
        answer = next((a for state in STATES if (a := spoken.answer(block, state))), None)
        ours = answer.ours if answer else None
        chosen += [r for r in block if ours is None or r.run == ours.run or (answer and r is answer.library)]
    return [{**r.model_dump(), "run": r.run, "file": file_of[r.id]} for r in chosen]


def where(device: str, name: str) -> str:
    """With which code the records of an experiment were measured, on how many cards if not on one, and that contenders
    did not take turns everywhere, or that calls were taken apart: `sources` names the cells."""
    records = records_of(device, name)
    commits = sorted({r["source"]["commit"][:7] for r in records if r["source"]["commit"]})
    said = f"The records were measured with the code at commit {_listed(commits)}"
    cards = {r["environment"]["chip"] for r in records if r["environment"].get("chip")}
    said += f", on {len(cards)} cards. " if len(cards) > 1 else ". "
    if apart(records):
        said += (
            "In some cells the newest records are of different runs, and contenders are compared by their shares of "
            "each run's limit, so that a speedup there is not the quotient of the two times. "
        )
    if any(r["overlap_us"] for r in records):
        said += (
            "In some cells the calls of one contender overlapped when they followed one another, so that a tiny "
            "kernel was put between the calls of all contenders. "
        )
    return f"{said}The end of the {'page' if device == MAIN else 'section'} names files and cells."


def apart(records: Iterable[dict[str, Any]]) -> list[tuple[str, str]]:
    """Cells whose newest records are of different runs."""
    runs: dict[tuple[str, str], set[str]] = {}
    for record in (r for r in records if r["time_us"]):
        runs.setdefault(cell(record), set()).add(record["run"])
    return [of for of, found in runs.items() if len(found) > 1]


def sources(device: str, name: str) -> str:
    """In which file the records of each cell of an experiment are, and which cells `where` speaks of."""
    records = records_of(device, name)
    names = cell_names(records)

    def listed(cells: Iterable[tuple[str, str]]) -> str:
        wanted = set(cells)
        return "all" if wanted == set(names) else ", ".join(f"`{said}`" for of, said in names.items() if of in wanted)

    files = list(dict.fromkeys((*files_of(device, name), *sorted({r["file"] for r in records}))))
    rows = [(f"`results/{file}`", listed(cell(r) for r in records if r["file"] == file)) for file in files]
    text = f"{grid(('file', 'cells with records in it'), rows)}\n"
    if found := listed(apart(records)):
        text += f"\nThe newest records are of different runs in {found}.\n"
    if found := listed(cell(r) for r in records if r["overlap_us"]):
        text += f"\nA tiny kernel was put between calls in {found}.\n"
    return text


def _listed(words: Iterable[str]) -> str:
    """ "a", "a and b", "a, b and c"."""
    *first, last = words
    return f"{', '.join(first)} and {last}" if first else last


def live(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Those of kernels that are still here, libraries among them."""
    here = {kernel.label for kernel in registry.all_kernels()}
    return [r for r in records if label(r) in here]


#: Page -> libraries that its text has a mean against each of, with their records' labels.
_SPARSE = {"FlashMLA": "peer/flash_mla_sparse", "FlashAttention-3": "peer/fa3_sparse"}
EACH = {"sparse_served": _SPARSE, "unseen_sparse": _SPARSE, "unseen_prefill": {"FlashAttention-3": "peer/fa3"}}
#: Pages whose files are problems of a seed each, which have means of their own.
SEEDS = ("unseen_sparse", "unseen_prefill")


def against_each(name: str) -> str:
    """What `summary` says of a part of a page: against one library at a time, of the libraries in `EACH`, over all
    record files of the page and, if each has a seed, over each; and without calls that compute next to nothing, or
    without the pipeline that wins by other means than its library's."""
    said = ""
    files = files_of(MAIN, name)
    seeds = files if name in SEEDS else ()
    for only in ("", *seeds) if len(EACH.get(name, {})) > 1 else seeds:
        here = live(records_of(MAIN, name, only) if only else records_of(MAIN, name))
        for library, peer in EACH.get(name, {}).items():
            some = [r for r in here if label(r) == peer or not label(r).startswith("peer/")]
            words = f", cells of `results/{only}`" if only else ""
            if mean := summary(some):  # a run need not have timed every library
                said += f"- Against {library} alone{words}: {mean.replace('Geometric', 'geometric', 1)}\n"
    if name == "unseen_indexer":
        mean = summary(not_empty(live(records_of(MAIN, name))))
        said += f"- Of {EMPTY_FLOPS // 10**6} MFLOP and more: {mean.replace('Geometric', 'geometric', 1)}\n"
    if name == "chunked_prefill":
        some = [r for r in live(records_of(MAIN, name)) if not label(r).startswith("cute-dsl/chunk_absorb")]
        said += f"- Of the pipeline that decompresses alone: {summary(some).replace('Geometric', 'geometric', 1)}\n"
    return said and f"{said}\n"


#: Page -> the library whose turns in older runs of a cell it shows too, in a section of their own.
EARLIER = {"unseen_prefill": "peer/fa3"}


def earlier(name: str) -> str:
    """A section with the runs of a page's files that newer ones replaced in its tables, if the library in `EARLIER`
    took turns in them; "" where there are none."""
    shown = {r["run"] for r in records_of(MAIN, name)} if name in EARLIER else set()
    runs: dict[str, list[dict[str, Any]]] = {}
    files: dict[str, str] = {}
    for file in files_of(MAIN, name) if name in EARLIER else ():
        for r in records_in(file):
            if r["time_us"] and r["run"] not in shown:
                runs.setdefault(r["run"], []).append(r)
                files[r["run"]] = f"`results/{file}`"
    older = {run: some for run, some in runs.items() if EARLIER[name] in map(label, some)}
    if not older:
        return ""
    table = without_comments(comparison(r for some in older.values() for r in some))
    where_from = _listed(dict.fromkeys(files[run] for run in older))
    return (
        "\n## Earlier runs of cells that were timed again\n\nThe contenders of a cell took turns in a run that a newer "
        f"one has replaced in all tables and means above. The records are in {where_from}.\n\n{table}\n"
    )


def against(records: list[dict[str, Any]]) -> str:
    """Summary and table of the fastest kernels of this project that are still here."""
    here = live(records)
    return f"{summary(here)}\n\n{{heading}}{without_comments(against_libraries(here))}\n"


def not_empty(records: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Those of cells with `EMPTY_FLOPS` or more."""
    return [r for r in records if workload.problem_from_record(r["problem"]).cost().flops >= EMPTY_FLOPS]


def lacking(device: str, name: str) -> str:
    """Which cells of an experiment have no time of a kernel of this project, in a sentence; "" where all have one."""
    files = files_of(device, name)
    seeds = [found[1] for file in files if (found := re.search(r"-(\d+)\.jsonl$", file))]
    runs = [[f"experiment={name}", *([f"seed={seed}"] if seed else [])] for seed in dict.fromkeys(seeds or [""])]
    configs = [compose(words) for words in runs]
    if any(any(config.experiment.draws().values()) for config in configs) and not seeds:
        return ""  # whose seeds no file's name says
    cells = [problem for config in configs for problem in expand_cells(config)]
    timed = {
        workload.problem_from_record(r["problem"])
        for r in records_of(device, name)
        if r["time_us"] and not label(r).startswith("peer/")
    }
    lacked = [problem for problem in cells if problem not in timed]
    labels = [problem.label for problem in cells]
    missing = [pd.label if labels.count(pd.label) == 1 else cell_name(pd) for pd in lacked]
    if not missing:
        return ""
    counted = f" Of the {len(cells)} cells {len(cells) - len(missing)} were measured"
    return f"{counted}." if len(missing) > MOST_NAMED else f"{counted}, all but {_listed([f'`{m}`' for m in missing])}."


#: Cells that were not measured, up to which a page names them.
MOST_NAMED = 8


def method(records: Iterable[dict[str, Any]], tables: str, names: str = CELLS) -> str:
    """How a page's records were measured, beside which libraries, how its cells are named, and what the columns of its
    tables mean."""
    labels = (label(r).removeprefix("peer/") for r in records if r["time_us"] and label(r).startswith("peer/"))
    found = [f"{LIBRARIES[name]} (`peer/{name}`)" for name in sorted(set(labels), key=list(LIBRARIES).index)]
    beside = f" {'The libraries are' if len(found) > 1 else 'The library is'} {_listed(found)}." if found else ""
    shared = f" {SHARED}" if "scheduled in every call" in tables else ""
    return f"{names} {METHOD}{beside}{shared}"


def page(name: str) -> str:
    """The text of an experiment's page."""
    records = records_of(MAIN, name)
    heading = f"{against_each(name)}## The fastest kernel here against the library\n\n"
    table = against(records).format(heading=heading)
    named = NAMES.get(name, CELLS)
    measured = (
        f"The times were measured on an {Device.get(MAIN).name}, where {CACHES.get(name, DENSE)}. "
        f"{method(records, table, named)}"
    )
    about = f"{WHAT[name]}{MORE.get(name, '')}{lacking(MAIN, name)}"
    return (
        f"{HEAD}\n# {name}\n\n{about}\n\n{measured}\n\n{where(MAIN, name)}\n\n{table}"
        f"\n## All contenders\n\n{without_comments(comparison(records))}\n{earlier(name)}"
        f"\n## Where the records are\n\n{sources(MAIN, name)}"
    )


def device_page(device: str) -> str:
    """The text of a further device's page."""
    text, records = "", []
    for name in FILES[device]:
        records += records_of(device, name)
        table = against(records_of(device, name)).format(heading="")
        named = f" {NAMES[name]}" if name in NAMES else ""
        about = (
            f"{WHAT[name]}{FURTHER.get(device, {}).get(name, '')}{lacking(device, name)}{named} {where(device, name)}"
        )
        text += f"\n## {name}\n\n{about}\n\n{table}\n{sources(device, name)}"
    measured = f"Unless an experiment says otherwise, {DENSE}. {method(records, text)}"
    return f"{HEAD}\n# {Device.get(device).name}\n\n{measured}\n{text}"


def gpus_page(device: str) -> str:
    """The text of the page about several GPUs of a device."""
    text = f"{HEAD}\n# Several {Device.get(device).name}\n\n{SEVERAL}\n"
    for name in OVER_GPUS[device]:
        text += f"\nThe records are those of `results/{name}`.\n\n{without_comments(over_gpus(records_in(name)))}\n"
    return text


def board() -> str:
    """The text of the page of dates: a row a nightly run, a column a workload, the newest run first."""
    files = sorted((ROOT / "results").glob(f"*/{NIGHTLY}"), key=lambda p: (p.name, p.parent.name), reverse=True)
    names = sorted(workload.names(), key=lambda name: (name != workload.DEFAULT, name))
    header = ["date", "card", "commit", "cells", "all", *names]
    rows = [board_row(load([file]).records, file.name[:10], names) for file in files]
    told = f"{grid(header, rows)}\n\nThe records of a row are those of `results/CARD/DATE-nightly.jsonl`."
    shown = told if rows else NO_RUN
    return f"{HEAD}\n# Board of dates\n\n{BOARD}\n\n{shown}\n"


NO_RUN = "No run is recorded yet: `mla-var3 sweep experiment=nightly` measures one."


def board_row(records: Sequence[Record], date: str, names: Sequence[str]) -> list[str]:
    """A run's row of the board: date, card, commit, cells, and a figure for all workloads and for each of `names`."""
    ratios: dict[str, list[float]] = {name: [] for name in names}
    shares: dict[str, list[float]] = {name: [] for name in names}
    told = spoken.cells(spoken.speaking(records, aside=True))
    passed = 0
    for block in told.values():
        found = spoken.answer(block, "burst")
        if found is None or found.ours is None:
            continue
        passed += 1
        name = str(found.ours.problem.get("workload", workload.DEFAULT))
        if found.of_one_run and found.ratio is not None:
            ratios[name].append(found.ratio)
        share = found.ours.of_limit("burst")
        shares[name] += [] if share is None else [share]

    def figure(some: Sequence[float]) -> str:
        return f"{as_ratio(geometric_mean(some), 4)} ({len(some)})" if some else "-"

    def of(name: str) -> str:
        mean = geometric_mean(shares[name])
        return f"{100 * mean:.0f} %" if mean is not None and not ratios[name] else figure(ratios[name])

    commits = sorted({r.source.commit[:7] for r in records if r.source.commit})
    cards = ", ".join(sorted({r.device for r in records}))
    cells = f"{passed} of {len(spoken.cells(records))}"
    everywhere = [ratio for some in ratios.values() for ratio in some]
    return [date, cards, ", ".join(commits) or "-", cells, figure(everywhere), *map(of, names)]


#: What examples/serve_vllm.py wrote, and what kernels of attention are called in it.
SERVED = "h200/traces/2026-11-28-serve_vllm.json"
ATTENDING = {
    "flash_fwd_splitkv_mla_kernel": "FlashMLA's", "flash_fwd_mla_combine_kernel": "FlashMLA's merge",
    "get_mla_metadata_kernel": "FlashMLA's schedule", "FlashAttnFwdSm90": "FlashAttention-3's",
    "FlashAttnFwdCombine": "FlashAttention-3's merge", "flash_mla_v23": "`flash_mla_v23`",
    "flash_mla_v24": "`flash_mla_v24`", "combine_2": "merge of `flash_mla_v24`", "make_schedule": "schedule",
}  # fmt: skip
#: A profile is of this many tokens of each request; what it holds was divided by them.
PROFILED = 33


def served() -> str:
    """The text of the page about vLLM: tables of what examples/serve_vllm.py measured, and what they say."""
    records = json.loads((ROOT / "results" / SERVED).read_text(encoding="utf-8"))
    compared: list[tuple[str, ...]] = []
    speeds: list[tuple[str, ...]] = []
    kernels: list[tuple[str, ...]] = []
    for r in records:
        of = (str(r["heads"]), r["engine"])
        if found := r.get("logits"):
            row = (f"{found[key]:.4f}" for key in ("median", "largest"))
            more = (f"{found[key]:.4f}" for key in ("prompt_mean", "prompt_largest"))
            compared.append((*of, *row, f"{100 * found['same_choice']:.1f}", *more))
        if "turn" in r:
            rates = (f"{r[f'{key}_tokens_a_second']:.0f}" for key in ("prefill", "decode", "few", "mixed"))
            speeds.append((*of, str(r["turn"]), *rates, f"{1e3 * r['prefix_cached_seconds']:.0f}"))
        for us, calls, name in r.get("kernels", ()):
            attends = next((said for part, said in ATTENDING.items() if part in name), None)
            if attends:
                whole = f"{PROFILED * r['us_a_step'] / 1e3:.1f}"
                kernels.append((*of, whole, attends, str(round(PROFILED * calls)), f"{us / calls:.1f}"))
    speeds.sort(key=lambda row: (int(row[0]), int(row[2])))
    words = (ROOT / "scripts" / "serve_vllm.md").read_text(encoding="utf-8")
    return words.format(
        head=HEAD, device=Device.get("h200").name, file=SERVED,
        compared=grid(
            ("heads", "engine", "median", "largest", "equal choices (%)", "prompts, mean", "prompts, largest"), compared
        ),
        speeds=grid(
            ("heads", "engine", "round", "prompts", "decode", "four requests", "mixed", "cached prompts (ms)"), speeds
        ),
        kernels=grid(("heads", "engine", "all kernels (ms)", "kernel", "calls", "us a call"), kernels),
    )  # fmt: skip


# ------------------------------------------------------------------- kernels for every GPU since Ampere
#: Experiment -> its record files, of which the newest run of a cell counts.
PORTABLE: dict[str, tuple[str, ...]] = {
    "portable": ("h200/2026-11-29-portable.jsonl", "h200/2026-11-29-portable-memory.jsonl"),
    "portable_sparse": ("h200/2026-11-29-portable_sparse.jsonl", "h200/2026-11-29-portable_sparse-second.jsonl"),
    "portable_prefill": tuple(f"h200/2026-11-29-portable_prefill{word}.jsonl" for word in ("", "-second", "-sections")),
}
#: Experiment -> the kernels that the versions are compared with, by what a table calls them.
PORTABLE_BESIDE: dict[str, dict[str, str]] = {
    "portable": {"FlashInfer's fa2": "peer/flashinfer_fa2", "Triton's": "triton/flash_mla"},
    "portable_sparse": {"Triton's": "triton/sparse_mla", "the version for Hopper": "cute-dsl/sparse_mla_v2"},
    "portable_prefill": {"version 0": "cute-dsl/flash_attention_mma"},
}
#: Shared memory of a CTA, with the device whose tilings were asked for: its rows are in this order.
MEMORIES = {"227 KB": "h200", "163 KB": "a100", "99 KB": "rtx4090"}
#: Version and most query rows of a cache -> shared memory -> the knobs of the tiling that is chosen there.
TILINGS: dict[tuple[str, int], dict[str, dict[str, int]]] = {
    ("cute-dsl/flash_mla_mma_v1", 16): {
        "163 KB": {"tile_m": 16, "tile_n": 16, "num_pipeline_stages": 8},
        "99 KB": {"tile_m": 16, "tile_n": 16, "num_pipeline_stages": 5},
    },
    ("cute-dsl/flash_mla_mma_v1", 32): {
        "163 KB": {"tile_m": 32, "tile_n": 16, "num_pipeline_stages": 7},
        "99 KB": {"tile_m": 32, "tile_n": 16, "num_pipeline_stages": 4},
    },
    ("cute-dsl/flash_mla_mma_v3", 1 << 30): {
        "163 KB": {"tile_n": 32, "num_pipeline_stages": 3},
        "99 KB": {"tile_n": 16, "num_pipeline_stages": 3},
    },
}
FEW_ROWS = 32
PORTABLE_WHAT = {
    "": (
        "The designs with products of single warps (`mma.sync`) use only instructions that every GPU since Ampere has. "
        "Version 3 of decode is built for Ampere, Ada and Hopper, and version 1 of prompts for Hopper alone. On Hopper "
        "other designs are faster, so nothing here is picked on the H200 that timed it. What A100, RTX and other cards "
        "take is not known: their tilings ran here, which says what less shared memory costs and nothing of those "
        "cards' times. All contenders of a row's cell took turns in one process. A ratio above 1 means that the "
        "version of the row is faster than the kernel that the column names."
    ),
    "portable": (
        "Cells of the page [decode](decode.md) (`experiment=portable`). `cute-dsl/flash_mla_mma_v1` is the version for "
        "up to 32 query rows of a cache and `cute-dsl/flash_mla_mma_v3` the one for more. Each was timed with its "
        "tiling for an H200 (227 KB of shared memory for a CTA), and with those that the dispatcher takes where a CTA "
        "may have 163 KB (A100) or 99 KB (RTX 4090, L40S, A40). FlashInfer and Triton's kernel have their own choice "
        "of tiling in all rows. That of Triton's kernel takes 216 KB of shared memory with 64 query rows and more, "
        "112 KB with 32 and 92 KB with 8 and 16: with 64 rows and more, tilings for 163 KB and 99 KB are compared with "
        "a kernel that needs more than these. What FlashInfer's fa2 takes is in no record."
    ),
    "portable_sparse": (
        "Decode over packed FP8 caches, by indices and, where `t4096` ends a name, by a page table of 4,096 tokens of "
        "each request (`experiment=portable_sparse`). A name begins with the layout of the cache: `v32` is that of "
        "DeepSeek V3.2, and `flat` has one scale for the whole cache. `top2048` are 2,048 tokens that indices name "
        "for each query token."
    ),
    "portable_prefill": (
        "Prompts over decompressed heads (`experiment=portable_prefill`), with keys of 192 columns and values of 128, "
        "and of 256 both where `d256_p0` ends a name. s are the query tokens of a request and t its keys, the prefix "
        "of a chunk among them; in `causal` problems a query sees no later key, and with `normal` and `lognormal` "
        "requests have unequal lengths, of which s and t are the means. Version 1 needs the shared memory and the "
        "registers of Hopper; version 0 is picked on the other GPUs, with other tilings. The MiB behind a "
        "version are those of a section of its keys and values, 40 of which are the default of version 1 "
        "([devlog](../../devlogs/flash_attention_mma/cute-dsl-v1.md#experiment-the-bench-with-wider-sections))."
    ),
}


def portable_records(name: str) -> list[Record]:
    """Of each cell the timed records of its newest run with one of the versions in it."""
    files = [ROOT / "results" / file for file in PORTABLE[name] if (ROOT / "results" / file).is_file()]
    runs: dict[tuple[str, str], dict[str, list[Record]]] = {}
    here = {kernel.label for kernel in registry.all_kernels()}
    for record in load(files).records:
        if record.time_us is not None and record.kernel.label in here:
            runs.setdefault(cell(record.model_dump()), {}).setdefault(record.run, []).append(record)
    newest: list[Record] = []
    for found in runs.values():
        own = {run: some for run, some in found.items() if any("_mma" in r.kernel.design for r in some)}
        if own:
            newest += max(own.values(), key=lambda some: max(r.at for r in some))
    return newest


def memory_of(record: Record) -> str | None:
    """The shared memory that the tiling of a record is chosen for; None for one that is chosen nowhere, as of another
    version."""
    rows = workload.problem_from_record(record.problem).rows
    own = next((of for (name, most), of in TILINGS.items() if name == record.kernel.label and rows <= most), None)
    if own is None or record.requested in (None, "default", {}):
        return None if own is None else "227 KB"
    return next((memory for memory, knobs in own.items() if knobs == record.requested), None)


def four_digits(us: float) -> str:
    return f"{us:.0f}" if us >= 1000 else f"{us:#.4g}"


def span(ratios: Sequence[float], cells: int) -> str:
    """The least and the largest, and of how many cells where these are fewer."""
    few = f" ({len(ratios)} cells)" if len(ratios) < cells else ""
    return f"{as_ratio(min(ratios))} to {as_ratio(max(ratios))}{few}" if ratios else "-"


def portable_section(name: str) -> str:
    """A section of the page: a row for each cell and tiling of a version."""
    records = portable_records(name)
    names = cell_names([r.model_dump() for r in records])
    beside = PORTABLE_BESIDE[name]
    decode = name == "portable"
    header = ["cell", *(["shared memory"] if decode else []), "version", "burst (us)", "sustained (us)",
              "burst, of limit (%)", "sustained, of limit (%)"]  # fmt: skip
    header += [f"{said} over it, {state} (x)" for said in beside for state in STATES]
    rows: list[list[str]] = []
    ratios: dict[tuple[str, str], dict[tuple[str, str], list[float]]] = {}
    for of, said in names.items():
        some = [r for r in records if cell(r.model_dump()) == of]
        others = {word: [r for r in some if r.kernel.label == wanted] for word, wanted in beside.items()}
        own = [r for r in some if "_mma" in r.kernel.design]
        memories = {r.id: memory for r in own if (memory := memory_of(r) if decode else "") is not None}
        own = [r for memory in (MEMORIES if decode else [""]) for r in own if memories.get(r.id) == memory]
        for place, record in enumerate(own):
            problem, memory = workload.problem_from_record(record.problem), memories[record.id]
            us = [four_digits(record.median(state) or 0.0) for state in STATES]
            shares = [f"{100 * share:.1f}" if (share := record.of_limit(state)) else "-" for state in STATES]
            mib = (record.tiling or {}).get("section_mib")
            section = f", {mib} MiB" if mib else ""
            label = f"{record.kernel.label}{section}"
            row = ["" if place else said, *([memory] if decode else []), label, *us, *shares]
            for word, them in others.items():
                for state in STATES:
                    other = next((r for r in them if r.id != record.id), None)
                    ratio = None if other is None else record.speedup(other, state)
                    row.append(as_ratio(ratio))
                    if decode and ratio is not None:
                        group = "up to 32" if problem.rows <= FEW_ROWS else "64 and more"
                        ratios.setdefault((memory, group), {}).setdefault((word, state), []).append(ratio)
            rows.append(row)
    known, shown = len(expand_cells(compose([f"experiment={name}"]))), sum(bool(row[0]) for row in rows)
    part = f"all {known} cells of the experiment" if shown == known else f"{shown} of the experiment's {known} cells"
    text = f"{PORTABLE_WHAT[name]} The table has {part}.\n\n"
    if decode:
        columns = [(word, state) for word in beside for state in STATES]
        head = ["shared memory", "query rows", "cells", *(f"{word} over it, {state} (x)" for word, state in columns)]
        lines = []
        for memory, group in itertools.product(MEMORIES, ("up to 32", "64 and more")):
            of_group = ratios.get((memory, group), {})
            most = max(map(len, of_group.values()), default=0)
            lines.append([memory, group, str(most), *(span(of_group.get(column, ()), most) for column in columns)])
        text += f"Least and largest ratio over the cells:\n\n{grid(head, lines)}\n\nAll rows:\n\n"
    commits = sorted({r.source.commit[:7] for r in records if r.source.commit})
    files = _listed([f"`results/{file}`" for file in PORTABLE[name] if (ROOT / "results" / file).is_file()])
    return (
        f"{text}{grid(header, rows)}\n\nThe records are in {files}, measured with the code at commit "
        f"{_listed(commits)}.\n"
    )


def portable() -> str:
    """The text of the page about kernels for every GPU since Ampere."""
    method = (
        f"The times were measured on an {Device.get(MAIN).name}. Where a section says nothing else, {DENSE}. "
        f"{CELLS} {TIMED}"
    )
    return (
        f"{HEAD}\n# Kernels for GPUs since Ampere\n\n{PORTABLE_WHAT['']}\n\n{method}\n\n## Decode\n\n"
        f"{portable_section('portable')}\n## Sparse decode and packed caches\n\n{portable_section('portable_sparse')}"
        f"\n## Prompts\n\n{portable_section('portable_prefill')}"
    )


def index() -> str:
    """The text of docs/results/README.md."""
    rows = "".join(f"- [{name}]({name}.md): {what}\n" for name, what in WHAT.items())
    others = "".join(
        f"- [{Device.get(name).name}]({name}.md): The results of {len(FILES[name])} experiments on this card.\n"
        for name in OTHERS
    )
    several = "".join(
        f"- [Several {Device.get(name).name}]({name}-several.md): Several GPUs share the tokens of long requests.\n"
        for name in OVER_GPUS
    )
    method = (
        f"The times on the pages of experiments were measured on an {Device.get(MAIN).name}. Unless a page says "
        f"otherwise, {DENSE}. {CELLS} {METHOD}"
    )
    return (
        f"{HEAD}\n# Results\n\nEach page is made from record files in `results/`, which it names, and a test makes it "
        f"again and compares.\n\n{method}\n\n{rows}{others}{several}"
        "- [Kernels for GPUs since Ampere](portable.md): Decode, sparse decode and prompts are computed by the "
        "products of single warps, with the tilings of A100 and RTX cards as well.\n"
        "- [Board of dates](board.md): How far the kernels were ahead of the fastest library on each date. A row is a "
        "date, and a column is a workload.\n"
        "- [vLLM](serve_vllm.md): vLLM 0.25.1 ran with its own backends and with `MLA_VAR3`. The page has its logits, "
        "tokens a second, and the time of its kernels (`examples/serve_vllm.py`).\n"
    )


def pages() -> dict[str, str]:
    """File name -> text of every page."""
    of_experiments = {f"{name}.md": page(name) for name in WHAT}
    further = {f"{name}.md": device_page(name) for name in OTHERS}
    several = {f"{name}-several.md": gpus_page(name) for name in OVER_GPUS}
    single = {"README.md": index(), "board.md": board(), "portable.md": portable(), "serve_vllm.md": served()}
    return {**single, **of_experiments, **further, **several}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("out", nargs="?", type=Path, default=ROOT / "docs" / "results", help="default: docs/results")
    out = parser.parse_args().out
    out.mkdir(parents=True, exist_ok=True)
    for name, text in pages().items():
        (out / name).write_text(text, encoding="utf-8")
        print(out / name)
    return 0


if __name__ == "__main__":
    sys.exit(main())
