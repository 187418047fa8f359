"""Version 18: flash_mla_v14 whose parts lie as its accumulators do."""
