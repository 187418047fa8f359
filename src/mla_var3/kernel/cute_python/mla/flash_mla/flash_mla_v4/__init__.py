"""Version 5: two warpgroups on one tile, splits joined in the kernel."""
