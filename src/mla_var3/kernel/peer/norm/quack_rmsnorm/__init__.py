"""quack's norm."""
