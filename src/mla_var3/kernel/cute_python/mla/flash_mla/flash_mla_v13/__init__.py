"""Version 13: flash_mla_v11 with first loads that wait for the length and the page alone."""
