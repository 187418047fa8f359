"""Version 2: of the KV tile on the diagonal, upper rows compute the half that they see."""
