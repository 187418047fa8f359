"""Splitting a request over blocks: how many parts, and joining their partial results."""
