"""Parts of versions whose two consumers run half a pair of tiles apart."""
