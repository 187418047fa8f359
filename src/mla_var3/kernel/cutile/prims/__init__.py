"""Leaf primitives of cuTile versions: each has one job and knows no schedule and no version."""
