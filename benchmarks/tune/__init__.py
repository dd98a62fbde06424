"""What `shoestring tune` is measured on, and the measurements.

python -m benchmarks.tune [--strict] [--only tune.PREFIX] [--list] [--budget MINUTES] [--runs FOLDER]

Batches of kills, searches of test functions and studies are stored as one JSON file each in `results/runs` and never
made twice: delete a file to make it again. What needs PostgreSQL is not run where it is not installed.
"""
