"""What takes a profile: events, torch's profiler, NVIDIA's tools, and what is read from each."""
