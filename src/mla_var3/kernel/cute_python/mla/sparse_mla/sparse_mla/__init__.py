"""The base version: query tiles of 64 heads of one query token, splits dealt on the device."""
