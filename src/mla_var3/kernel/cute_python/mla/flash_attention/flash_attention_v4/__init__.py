"""Version 1: of the KV tile on the diagonal, upper rows compute the half that they see."""
