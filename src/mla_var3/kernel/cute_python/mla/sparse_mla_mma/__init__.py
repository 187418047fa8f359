"""The absorbed form with warp-level products, for every GPU since Ampere."""
