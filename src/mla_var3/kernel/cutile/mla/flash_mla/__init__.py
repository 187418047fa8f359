"""Absorbed MLA in cuTile: attention in latent space, K and V are one tensor."""
