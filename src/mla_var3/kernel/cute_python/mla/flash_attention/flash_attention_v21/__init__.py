"""Version 21: keys of a query tile in splits, where query tiles are few."""
