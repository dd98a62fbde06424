"""llama.cpp's server of a GGUF file, on loopback, until standard input ends.

python -m benchmarks.decode.llama_server FILE THREADS SLOTS CONTEXT
"""

from __future__ import annotations

import sys
from importlib import import_module


def main(file: str, threads: str, slots: str, context: str) -> None:
    """Serve with the server's own defaults, but for its threads, slots and context."""
    xllamacpp = import_module("xllamacpp")
    params = xllamacpp.CommonParams()
    params.model.path = file
    params.n_ctx, params.n_parallel, params.verbosity = int(slots) * int(context), int(slots), -1
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = int(threads)
    server = xllamacpp.Server(params)  # it ends with the object
    print(server.listening_address, flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main(*sys.argv[1:])
