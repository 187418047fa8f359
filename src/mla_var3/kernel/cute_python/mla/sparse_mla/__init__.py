"""Attention to the cached tokens that indices name, over packed caches."""
