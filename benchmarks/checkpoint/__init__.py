"""checkpoint: what it survives, what it costs, and what it finds.

python -m benchmarks.checkpoint [--strict] [--only checkpoint.PREFIX] [--list] [--cache FOLDER]
"""
