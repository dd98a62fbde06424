"""Drawn compositions of features, each compared with one process; `python -m tests.rigs.compositions 0 300`."""
