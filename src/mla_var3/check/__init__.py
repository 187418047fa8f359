"""Whether a kernel is right: its outputs against the oracle of its workload, on hostile inputs."""
