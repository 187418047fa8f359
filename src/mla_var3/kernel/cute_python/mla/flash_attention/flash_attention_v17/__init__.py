"""Version 17: the wait for O stands inside the softmax."""
