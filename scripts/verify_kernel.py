#!/usr/bin/env python3
"""Is a kernel right? scripts/verify_kernel.py my_kernel.py --rtol 1e-3 --atol 1e-3"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

from mla_var3.lab.contract import main_verify

if __name__ == "__main__":
    sys.exit(main_verify())
