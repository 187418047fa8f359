"""MLA over a mixed cache in cuTile: old tokens latent, new tokens decompressed."""
