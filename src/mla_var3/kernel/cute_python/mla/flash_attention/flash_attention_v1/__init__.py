"""Version 1: the first scores of a query tile beside the last product of the one before."""
