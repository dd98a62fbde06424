"""precision: 16 bits chosen on the graph of a step, beside torch's autocast, which decides for each operator alone.

    python -m benchmarks.precision

Both are computed operator by operator from graphs that are traced in the same way, on one thread. bf16 products are
slow on most CPUs, so no figure here is a time; what 16 bits save on a GPU needs a GPU.
"""
