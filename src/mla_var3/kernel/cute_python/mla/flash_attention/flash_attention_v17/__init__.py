"""Version 17: the wait for O stands inside the softmax, and O is stored beside scores."""
