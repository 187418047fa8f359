#!/usr/bin/env python3
"""Copies a kernel version under the next version number: scripts/clone_kernel.py triton/flash_mla"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

from mla_var3.lab.clone import main

if __name__ == "__main__":
    sys.exit(main())
