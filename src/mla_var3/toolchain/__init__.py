"""Compiling without a GPU, and reading what came out: registers, shared memory, spills, instructions.

One module a job: `sass` reads cubins, `loops` finds the loops of their code and `spills` where registers are spilled,
`resources` judges them, `cute`, `cutile` and `triton_` drive the compilers, `pool` drives many compilations at once,
`artefacts` keeps files. Nothing is imported here, so the room costs nothing.
"""
