"""Leaf primitives of CuTe DSL versions: each has one job and knows no schedule and no version."""
