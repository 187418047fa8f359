"""Matrix products around attention."""
