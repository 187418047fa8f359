"""Rotation of new tokens, and their way into a packed cache."""
