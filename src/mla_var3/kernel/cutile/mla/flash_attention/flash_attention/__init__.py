"""Base version (v0)."""
