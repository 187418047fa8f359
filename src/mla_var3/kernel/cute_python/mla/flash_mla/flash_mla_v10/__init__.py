"""Version 10: parts of a single tile, and an order of steps for blocks that wait for memory."""
