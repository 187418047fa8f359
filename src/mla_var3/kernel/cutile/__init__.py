"""Kernels written in cuTile, NVIDIA's tile language for Python."""
