"""Version 1: two groups of warps take turns at the scores, and K and V change hands with the turn."""
