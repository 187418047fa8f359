"""Version 3: a cluster of two CTAs shares a token's columns, and exchanges scores and probabilities."""
