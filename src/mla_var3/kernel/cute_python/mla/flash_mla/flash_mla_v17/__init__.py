"""Version 17: flash_mla_v16 in clusters of four row tiles."""
