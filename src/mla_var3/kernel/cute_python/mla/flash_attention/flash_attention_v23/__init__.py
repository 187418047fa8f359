"""Version 23: of query tiles with up to 128 rows, each CTA of a cluster has that of a head."""
