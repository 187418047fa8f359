"""The bench room: calibration, timing, the worker that measures cells, and records."""
