"""What other people's benchmarks read: definitions, workloads and solutions, and tables in their columns."""
