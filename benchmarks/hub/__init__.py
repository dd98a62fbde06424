"""hub: runs arrive whole under kills, nobody sees what is not theirs, and tables, charts and pages open fast.

python -m benchmarks.hub [--strict] [--only hub.table] [--list] [--trackio PYTHON] [--rounds N]

`--trackio` names an interpreter in whose environment trackio is installed, for the bars that compare with its server.
`--rounds` says how often pages are opened in each situation; fewer than 6 rounds hold no bar.
"""
