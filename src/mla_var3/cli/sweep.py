"""`mla-var3 sweep`: experiment in, records and tables out."""

from __future__ import annotations

from collections.abc import Sequence

HELP = "run an experiment: experiment in, records and tables out"
USAGE = """\
usage: mla-var3 sweep [experiment=NAME] [GROUP=CHOICE ...] [KEY=VALUE ...] [-m]

Runs every kernel on every cell of an experiment. With the target GPU in the machine: checked and timed. Without it:
compiled for the target, checked on the CPU at small sizes, and shown beside recorded measurements.

groups (conf/<group>/*.yaml; a conf/ folder where you start adds to them):
{groups}

keys:
  problem.b=64             set a field in every cell: b s t h h_kv k p d n causal page dtype lengths
  tiling.num_splits=4      set a knob in every kernel that has it
  tilings=[...]            run every kernel in each of these, in turn: 'tilings=[{{num_splits: 4}},{{}}]'
  bench.burst_rounds=9     a field of BenchSettings; bench.tune=true tries a version's tilings first
  profile.launches=3       a field of the chosen profile; each passed point is profiled after all were timed
  part=1/4                 every 4th cell from the 1st; the other parts later, with resume=true
  resume=true              skip points whose records exist already
  results_dir=results      measured records: <results_dir>/<device>/<date>-<experiment>.jsonl
  compile_dir=out/results  the same for compiled points and CPU runs
  jobs=0                   compiler processes; 0 is one a core
  launcher=ray             on a Ray cluster: cells spread over its GPUs, compiling over its CPU nodes (docs/cluster.md)
  device=[h100,h200]       with launcher=ray, each cell on each of these; auto is every kind that the cluster has
  verbose=true             as -v: every table on the terminal; otherwise they are in <compile_dir>/<device>/*.txt

kernels= also takes names and wildcards: kernels=cute-dsl/flash_mla,triton/*
kernels=dispatch is what the dispatcher picks for each cell; beside others: kernels=dispatch,cute
'kernels.only=[{{kernels: peer/*, s: 1}}]' keeps versions to the cells with these fields
-m runs every combination of comma-separated values; --cfg job prints the configuration instead of running it.

examples:
  mla-var3 sweep experiment=decode
  mla-var3 sweep experiment=decode kernels=cute problem.b=64 tiling.num_splits=4 resume=true
  mla-var3 sweep -m experiment=ladder kernels=cute,triton problem.b=32,128
  mla-var3 sweep experiment=compile_matrix jobs=8
"""


def main(words: Sequence[str]) -> int:
    """Runs `mla-var3 sweep WORDS`; the words are Hydra's, so argparse does not see them."""
    if any(word in ("-h", "--help") for word in words):
        print(USAGE.format(groups=_groups_text()))
        return 0
    from mla_var3.lab.sweep.run import main as run

    return run(list(words))


def _groups_text() -> str:
    """The config groups and their choices, for the help of sweep."""
    from mla_var3 import paths
    from mla_var3.device import Device

    lines = []
    for group in ("experiment", "kernels", "model", "device", "bench", "profile"):
        names = paths.options(group)
        if group == "device":
            names += [d.key for d in Device.all()]
        lines.append(f"  {group:11}{', '.join(names)}")
    return "\n".join(lines)
