"""Version 15: sums are added behind the exponentials, and half of P is rounded beside them."""
