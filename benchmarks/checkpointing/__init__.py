"""The parts of benchmarks/checkpoint.py."""
