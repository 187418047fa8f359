"""Kernel versions, by language, layer and design; `registry` finds them."""
