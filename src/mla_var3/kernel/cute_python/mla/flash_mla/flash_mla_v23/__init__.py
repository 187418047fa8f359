"""Version 23: persistent CTAs with 64-row query tiles, splits dealt on the device."""
