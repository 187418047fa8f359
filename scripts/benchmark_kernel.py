#!/usr/bin/env python3
"""Times a kernel that is right: scripts/benchmark_kernel.py my_kernel.py"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

from mla_var3.lab.contract import main_benchmark

if __name__ == "__main__":
    sys.exit(main_benchmark())
