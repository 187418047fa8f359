"""Version 11: flash_mla_v9 with consumers that share P, and first loads that leave sooner."""
