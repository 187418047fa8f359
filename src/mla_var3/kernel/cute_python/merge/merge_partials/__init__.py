"""Merging of what parts of a sequence gave, by their log-sum-exp."""
