"""Executables that stand in for ncu and nsys, and canned output."""

from __future__ import annotations

import sys
import textwrap
from pathlib import Path

METRICS: dict[str, tuple[str, str]] = {
    "gpu__time_duration.sum": ("ns", "220,500"),
    "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_elapsed": ("%", "71.5"),
    "gpu__dram_throughput.avg.pct_of_peak_sustained_elapsed": ("%", "55.25"),
    "dram__bytes_read.sum": ("byte", "900,000,000"),
    "dram__bytes_write.sum": ("byte", "16,000,000"),
    "lts__t_sector_hit_rate.pct": ("%", "42.0"),
    "sm__warps_active.avg.pct_of_peak_sustained_active": ("%", "18.7"),
    "smsp__warps_eligible.avg.per_cycle_active": ("warp", "0.31"),
    "gpc__cycles_elapsed.avg.per_second": ("hz", "1,500,000,000"),
    "sm__cycles_active.avg": ("cycle", "240,000"),
    "sm__cycles_active.max": ("cycle", "300,000"),
    "l1tex__data_bank_conflicts_pipe_lsu_mem_shared.sum": ("", "500"),
    "l1tex__data_pipe_lsu_wavefronts_mem_shared.sum": ("", "2,000"),
    "launch__registers_per_thread": ("register/thread", "168"),
    "launch__waves_per_multiprocessor": ("", "1.94"),
    "launch__grid_size": ("", "256"),
    "launch__block_size": ("", "384"),
    "smsp__average_warps_issue_stalled_selected_per_issue_active.ratio": ("inst", "1"),
    "smsp__average_warps_issue_stalled_gmma_per_issue_active.ratio": ("inst", "6"),
    "smsp__average_warps_issue_stalled_long_scoreboard_per_issue_active.ratio": ("inst", "2"),
    "smsp__average_warps_issue_stalled_long_scoreboard_pipe_l1tex_per_issue_active.ratio": ("inst", "2"),
    "smsp__average_warps_issue_stalled_barrier_per_issue_active.ratio": ("inst", "1"),
}


def raw_csv(*, noise: bool = True) -> str:
    """`--page raw --csv` of a main kernel and a short combine."""
    columns = ["ID", "Process ID", "Kernel Name", "Block Size", *METRICS]
    units = ["", "", "", "", *[unit for unit, _ in METRICS.values()]]
    main = ["0", "7", "flash_mla", "(384, 1, 1)", *[value for _, value in METRICS.values()]]
    short = ["1", "7", "combine<512, 2>", "(128, 1, 1)", "4,000", *["n/a"] * (len(METRICS) - 1)]
    rows = [",".join(f'"{cell}"' for cell in row) for row in (columns, units, main, short)]
    return "\n".join((["==PROF== Connected to process 7"] if noise else []) + rows) + "\n"


#: As ncu 2025.3.1 printed it for `--print-source sass`, with fewer columns.
SOURCE_CSV = """\
"Kernel Name","flash_mla"
"Address","Source","Warp Stall Sampling (All Samples)","stall_long_sb","stall_wait","stall_wait (Not Issued)"
"0x10","      HGMMA.64x256x16.F32.BF16 R24, gdesc[UR4]","120","100","20","9"
"0x20","      WARPGROUP.DEPBAR.LE gsb0, 0x0","60","10","50","0"
"0x30","      EXIT","0","0","0","0"
"""

#: And for `--print-source cuda,sass`: a file's lines, each above its instructions, and dots where some were left out.
#: Two lines are the package's own, wherever they stand now (`lines_csv`).
_LINES_CSV = """\
"File Path","/elsewhere/src/mla_var3/kernel/cute_python/mla/flash_mla/flash_mla_v24/flash_mla_v24.py"
"Function Name","flash_mla_v24_0"
"Line No","Source","Address","Source","Warp Stall Sampling (All Samples)","# Samples","stall_barrier","stall_long_sb"
"1","print("a kernel", "of few rows")","-","-","0","0","0","0"
"{code}","page = following","-","-","7","7","7","0"
"","","0x40","      IMAD R1, R2, R3, R4","7","7","7","0"
"","","...","...","-","-","-","-"
"{below}","# Of a last panel that is not full, what has columns: Q has none there.","-","-","50","50","3","40"
"","","0x10","      SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [R27+URZ], R24","10","10","3","0"
"","","0x50","@!P0  BRA 0x7f991b7ba1e0","40","40","0","40"
"File Path","/elsewhere/site-packages/nobody/here.py"
"Function Name","flash_mla_v24_0"
"Line No","Source","Address","Source","Warp Stall Sampling (All Samples)","# Samples","stall_barrier","stall_long_sb"
"5","","-","-","3","3","0","3"
"","","0x60","      NOP","3","3","0","3"
"""


def lines_csv(code: int, below: int) -> str:
    """The page with its two lines of flash_mla_v24.py: one of code, and one that a wait above it is counted as."""
    return _LINES_CSV.format(code=code, below=below)


NSYS_CSV = """\
Processing [report.sqlite] with [cuda_gpu_trace.py]...
Start (ns),Duration (ns),CorrId,GrdX,Device,Ctx,Strm,Name
1000000,200000,1,256,NVIDIA H200 (0),1,7,"flash_mla"
1210000,4000,2,128,NVIDIA H200 (0),1,7,"combine<512, 2>"
1212000,10000,3,1,NVIDIA H200 (0),1,13,"side"
"""

PERMISSION = (
    "==ERROR== ERR_NVGPUCTRPERM - The user does not have permission to access NVIDIA GPU Performance Counters on the "
    "target device 0."
)
NOTHING = "==WARNING== No kernels were profiled."
AVAILABLE = f"{NOTHING}\nAvailable Kernels:\n    1. other_kernel\n    2. vectorized_elementwise_kernel\n"


def install(folder: Path, name: str, body: str) -> Path:
    """An executable `name` in `folder`. `body` is Python that sees `args`, `option(name)`, and the log of its calls."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / name
    head = f"""\
    #!{sys.executable}
    import pathlib, sys
    args = sys.argv[1:]
    with open({str(folder / (name + ".calls"))!r}, "a") as file:
        file.write("\\x1f".join(args) + "\\n")

    def option(*names):
        return next((args[i + 1] for i, word in enumerate(args) if word in names), None)
    """
    path.write_text(textwrap.dedent(head) + "\n" + textwrap.dedent(body))
    path.chmod(0o755)
    return path


def calls(folder: Path, name: str) -> list[list[str]]:
    """The arguments of each call of an installed executable."""
    path = folder / f"{name}.calls"
    return [line.split("\x1f") for line in path.read_text().splitlines()] if path.exists() else []


def ncu(
    folder: Path,
    said: str = "==PROF== Disconnected",
    *,
    report: bool = True,
    status: int = 0,
    csv: str = "",
    lines: str = "",
) -> Path:
    """An ncu that says `said`, writes a report or not, and answers --import with canned pages."""
    return install(
        folder,
        "ncu",
        f"""\
        if "--import" in args:
            pages = {{"cuda,sass": {lines!r}, "sass": {SOURCE_CSV!r}}}
            print({(csv or raw_csv())!r} if option("--page") == "raw" else pages[option("--print-source")])
            sys.exit(0)
        print({said!r})
        if {report!r}:
            pathlib.Path(option("-o") + ".ncu-rep").write_bytes(b"report")
        sys.exit({status})
        """,
    )


def nsys(folder: Path, *, ending: str = ".nsys-rep", csv: str = NSYS_CSV) -> Path:
    return install(
        folder,
        "nsys",
        f"""\
        if args[0] == "stats":
            print({csv!r})
        else:
            pathlib.Path(option("--output") + {ending!r}).write_bytes(b"report")
        """,
    )
