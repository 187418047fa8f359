"""Building blocks that cuTile kernel versions share."""
