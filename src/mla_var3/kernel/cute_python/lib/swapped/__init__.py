"""Tokens on M, query rows on N: shapes, the consumer, the ring of panels, and the work items."""
