"""Rotation of new tokens, and their way into the cache."""
