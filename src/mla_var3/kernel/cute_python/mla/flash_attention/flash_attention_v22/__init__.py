"""Version 22: query tiles of short requests hold the query heads that share a kv head."""
