"""Version 18: a shorter way from one query tile to the next, and query tiles that end where a KV tile is saved."""
