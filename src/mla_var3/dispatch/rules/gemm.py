"""The products of queries and of outputs with the up-projections of the latent, head by head."""

from __future__ import annotations

from mla_var3.dispatch.rule import HOPPER, Rule

RULES = (
    Rule(
        "cute-dsl/absorb_gemm",
        "its operands are swapped, so that few tokens are not padded to the 64 of a wgmma",
        archs=HOPPER,
        records=("89eab3e2d178", "3ae9d4db3d93", "7a1c1c3c85b4", "b4530fd9e193"),
    ),
    Rule("triton/absorb_gemm", "it takes GPUs that no version in CuTe DSL is written for"),
    Rule("cutile-dsl/absorb_gemm", "the last resort"),
)
