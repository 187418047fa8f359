"""Version 8: parts stored as they lie in registers."""
