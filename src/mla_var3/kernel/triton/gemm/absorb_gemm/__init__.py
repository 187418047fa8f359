"""The two products per head of absorbed attention."""
