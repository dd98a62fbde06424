"""Benchmarks: one module an area, one row a bar, results committed as `results/<area>.json`.

An area's module declares every bar up front and says how each is measured:

    def top_k_step(_: Deadline) -> Measured:
        return paired(dense, top_k, rounds=12).measured()

    def gpu_rows() -> list[Bar]:       # what `python -m benchmarks.gpu` collects
        return [Bar("comm.top-k-h200", "dense step over Top-k step", ">=", 1.5, measure=top_k_gpu, gpu=True)]

    def rows() -> list[Bar]:
        top_k = Bar("comm.top-k", "dense step over Top-k step", ">=", 4, baseline="DDP", measure=top_k_step)
        return [top_k, *gpu_rows()]

    if __name__ == "__main__":
        sys.exit(main("comm", rows))

Then `python -m benchmarks.comm [--strict] [--only comm.top] [--skip comm.top-k] [--list]` measures, prints a line a bar
and updates the area's results; `python -m benchmarks.gpu` does so for the GPU bars of every area; `python -m
benchmarks.evidence` writes `docs/evidence.md` from all results. Bars that share one run call one `functools.cache`d
function; one that holds memory of a GPU is `harness.shared` instead.
"""
