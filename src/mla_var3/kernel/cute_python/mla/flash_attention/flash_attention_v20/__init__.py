"""Version 20: maxima beside the issue of a product, and a store of O beside the issue of scores."""
