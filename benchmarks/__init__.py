"""How fast it is, as ratios of two things measured in turn on the same machine: `python -m benchmarks`."""
