"""A laboratory for Multi-head Latent Attention (MLA) kernels written from Python."""

from __future__ import annotations

__version__ = "0.1.0"
