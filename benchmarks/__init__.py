"""Benchmarks: `./run bench NAME`. Recorded results lie in `benchmarks/results/`."""
