"""cuTile versions of `flash_attention`."""
