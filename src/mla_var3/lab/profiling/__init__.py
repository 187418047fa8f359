"""Looking into one kernel: `mla-var3 profile` and the group `profile`.

event       a short timing between CUDA events, beside the roofline
annotation  the first pass: roofline position, the decisive counters, resources from the binary, a baseline beside it
ncu         every section of Nsight Compute with source lines
nsys        Nsight Systems' trace
timeline    torch's profiler: kernels, overlap and gaps, and a Chrome trace; needs no tool and no permission
trace       the timeline inside a kernel in CuTe DSL: what each warp does and waits for, a picture and a Chrome trace

Every profile has a folder of its own, `out/profiles/<mode>/<kernel>/<params>/<time>/`. Nothing here is imported by a
kernel version, and nothing heavy at import.
"""

from __future__ import annotations

MODES = ("event", "annotation", "ncu", "nsys", "timeline", "trace")
DISABLED = "disabled"
