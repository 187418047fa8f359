"""Versions written in CuTe DSL."""
