"""Batched products of cuBLAS."""
