"""decode: fewer forward passes for the same text.

python -m benchmarks.decode [--strict] [--only decode.PREFIX] [--list] [--budget MINUTES] [--runs FOLDER]
    [--cache FOLDER]

Every training run is stored as one JSON file in `results/runs` and never made twice; trained models are kept in the
cache.
"""
