"""Merging of partial attention."""
