"""Which kernels there are: versions found by walking, libraries that are installed, what each record's code was."""
