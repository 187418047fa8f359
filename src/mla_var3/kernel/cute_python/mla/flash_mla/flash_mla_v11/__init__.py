"""Version 9: swapped operands with an early start and an ending in which the consumers meet once."""
