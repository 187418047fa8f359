"""What the wrappers of other people's libraries share."""
