"""hub: runs arrive whole and clips are converted under kills, nobody sees what is not theirs, and pages open fast.

python -m benchmarks.hub [--strict] [--only hub.table] [--list] [--trackio PYTHON] [--rounds N]
                        [--budget MINUTES] [--runs FOLDER]

`--trackio` names an interpreter in whose environment trackio is installed, for the bars that compare with its server.
`--rounds` says how often pages are opened in each situation; fewer than 6 rounds hold no bar.
Clips are converted in batches that are stored in `--runs`, so that `hub.clips-transcodes` continues where it stopped;
no new batch is begun after `--budget` minutes.
"""
