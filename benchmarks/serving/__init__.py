"""serving: what clients send to an OpenAI-compatible server works, exactly, for many clients at a time.

python -m benchmarks.serving [--strict] [--only PART] [--list]

A part is a module of this package, such as `crowd`: `--only crowd` measures the bars `serving.crowd-…`.
"""
