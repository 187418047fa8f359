"""Peers of the `mla` layer: attention over latent (decode) or decompressed (prefill) keys."""
