"""parallel: pipelines beside one process, beside DDP and beside lossy exchanges, on hosts that slow links connect.

    python -m benchmarks.parallel

Each virtual host may use an equal part of the machine's processors (a cgroup's quota), so a stage that waits lends
nothing to the others. Steps of all methods alternate in one launch, and a ratio is one of the same block.
"""
