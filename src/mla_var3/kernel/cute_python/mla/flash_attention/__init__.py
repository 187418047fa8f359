"""The decompressed form: every head has its own keys and values."""
