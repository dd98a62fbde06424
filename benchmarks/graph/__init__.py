"""graph: the rules of operators against one rank, and plans that are searched on a traced step.

    python -m benchmarks.graph

Nothing here is trained. Steps are traced on fake tensors; rules and plans are computed on all ranks within one process,
in double precision, and compared with one rank. Clusters are assumed, so objectives are predictions.
"""
