"""The recipes on real work: that each does what it is for, and which of its better methods are better.

python -m benchmarks.recipes [--strict] [--only PART] [--list] [--budget MINUTES] [--runs FOLDER]

A part is a recipe with a module of this package, such as `quality`: `--only quality` measures the bars
`recipes.quality-…`. Every training is stored in a folder of its recipe below `--runs` and ends after `--budget`
minutes; the next call continues.
"""
