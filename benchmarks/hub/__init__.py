"""hub: runs arrive whole under kills, nobody sees what is not theirs, and tables and charts open fast.

python -m benchmarks.hub [--strict] [--only hub.table] [--list] [--trackio PYTHON]

`--trackio` names an interpreter in whose environment trackio is installed, for the bars that compare with its server.
"""
