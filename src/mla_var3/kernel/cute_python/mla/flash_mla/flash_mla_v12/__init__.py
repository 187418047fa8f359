"""Version 12: flash_mla_v10 with first loads that wait for the length and the page alone."""
