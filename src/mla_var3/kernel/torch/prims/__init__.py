"""Functions of torch operations that several versions call."""
