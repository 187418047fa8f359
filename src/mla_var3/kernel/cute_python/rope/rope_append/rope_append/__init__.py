"""Base version."""
