"""Rigs that kill and damage runs, shared by tests and benchmarks; both run from the root of the repository."""
