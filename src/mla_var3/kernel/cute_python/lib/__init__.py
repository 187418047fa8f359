"""Building blocks that CuTe DSL versions share."""
