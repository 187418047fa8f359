"""Sweeps: an experiment in, records and tables out. `run` is the entry; `config` is what Hydra composes."""
