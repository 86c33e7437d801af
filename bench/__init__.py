"""Benchmarks: each compares two things side by side in one run. Started as modules, from the repository's root."""
