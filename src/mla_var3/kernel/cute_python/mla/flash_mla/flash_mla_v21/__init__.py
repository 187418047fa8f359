"""Version 21: persistent CTAs with 64-row query tiles, splits dealt on the device."""
