"""The readable baseline: persistent CTAs of two consumers, query tiles dealt on the device."""
