"""Version 1: packed caches widened on their way into the A operand's registers, any number of heads."""
