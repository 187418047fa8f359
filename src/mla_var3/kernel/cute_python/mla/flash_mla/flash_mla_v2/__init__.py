"""Version 2: swapped operands for few query rows."""
