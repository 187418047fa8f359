"""Version 16: two CTAs share K and V, and sums are added behind the exponentials."""
