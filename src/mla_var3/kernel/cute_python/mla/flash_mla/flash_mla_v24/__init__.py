"""Version 24: persistent CTAs with few query rows, KV tiles on the M side of the MMA, splits dealt on the device."""
