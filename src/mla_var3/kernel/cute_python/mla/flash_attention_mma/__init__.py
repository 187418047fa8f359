"""Prompts over decompressed heads with warp-level products, for every GPU since Ampere."""
