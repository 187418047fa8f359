"""Split-KV for CuTe DSL versions: the tile scheduler, the layout of partials, combine and merges, queries' blocks."""
