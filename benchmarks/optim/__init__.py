"""What optimizers and schedules are measured on, and the measurements.

python -m benchmarks.optim [--strict] [--only optim.PREFIX] [--list] [--budget MINUTES] [--runs FOLDER]

Each run on images and on text is stored as one JSON file in `results/runs` and never made twice: delete the file to
make it again.
`python -m benchmarks.optim.pictures` makes the table and the picture of `docs/guides/large-batches.md` from them.
"""
