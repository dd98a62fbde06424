"""Learning from preferences beside TRL: equality, reward accuracy, time and memory, a known preference, and resuming.

Time and memory of learning from chats stand here, too, for the same generator, models and peer serve.

python -m benchmarks.preference [--strict] [--only preference.PREFIX] [--list] [--budget MINUTES] [--trial]
    [--runs FOLDER]

Every training is stored in the folder `--runs` and ends after `--budget` minutes; the next call continues. `--trial`
runs everything at small size, with a folder and results of its own that are deleted.

TRL is a peer of the benchmark alone: `pip install --no-deps --target FOLDER 'trl==1.16.*'`, and FOLDER in PYTHONPATH.
"""
