"""Benchmarks: rivals interleaved in one process, compared by ratios, written as JSON."""
