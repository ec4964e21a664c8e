"""Machines joined by a slow network, played on one machine: see benchmarks/slow_link.py."""
