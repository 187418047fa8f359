"""cuTile kernels of the MLA layer."""
