"""Analysis of code without jax.jit: JAX dispatches operations one by one, which takes longer than running them."""

from __future__ import annotations

import re
from collections.abc import Iterator

import numpy as np

from shoestring.profile.analyses.reading import Place, Reading
from shoestring.profile.findings import Finding
from shoestring.profile.tree import NodeKind

SHARE = 0.25
"""A function is reported if dispatching its operations takes at least this share of the profiled time."""
FEWEST = 3
"""A function is reported if it dispatches at least this many different operations."""
ONE_CALL = 20_000
"""Nanoseconds for dispatching one compiled program, which a jitted function still takes."""
_STARTS = re.compile(r"/jax/_src/(numpy|lax|nn|scipy|random|dispatch|prng|api)\b|/profile/jax_calls\.py\t")
_OPERATION = re.compile(r"/jax/_src/(numpy|lax|nn|scipy|random)/\w+\.py\t")
_PART = re.compile(r"\.<locals>\.<(listcomp|genexpr|lambda|dictcomp|setcomp)>")
_JIT = re.compile(r"/jax/_src/(pjit|compiler|linear_util)\.py\t|/jax/_src/interpreters/")


def unjitted(reading: Reading) -> Iterator[Finding]:
    """Find functions whose operations JAX dispatches one by one."""
    tree = reading.tree
    if not reading.matching(_OPERATION).any():
        return
    python = tree.kind == NodeKind.PYTHON
    starts = reading.under(_STARTS) & ~reading.under(_JIT) & ~reading.traced & python
    operations = reading.matching(_OPERATION) & starts
    functions: dict[tuple[str, str], list[int]] = {}
    for node in np.flatnonzero(starts & (tree.own > 0)).tolist():
        line = int(reading.lines[node])
        file, _, function = tree.names[tree.name[line]].partition("\t")
        functions.setdefault((file, _PART.sub("", function)), []).append(node)
    for (file, _), nodes in functions.items():
        taken = int(tree.own[nodes].sum())
        lines: dict[Place, int] = {}
        for node in nodes:
            lines[reading.place(node)] = lines.get(reading.place(node), 0) + int(tree.own[node])
        compiled = [call for call in reading.calls if call.place in lines]
        kinds = {call.name for call in compiled} | {tree.names[tree.name[node]] for node in nodes if operations[node]}
        if not file or reading.share(taken) < SHARE or len(kinds) < FEWEST:
            continue
        runs = float(np.median([call.count for call in compiled])) if compiled else 0.0
        saved = max(taken - ONE_CALL * runs, 0.0)
        yield reading.finding(
            "JAX operations are started one by one",
            max(lines, key=lambda place: lines[place]),
            f"Python takes {reading.spent(taken)}, to start {len(kinds)} or more"
            " kinds of operations in this function, outside of jax.jit.",
            "Put the function that does them into jax.jit, and a loop over it into jax.lax.scan or fori_loop.",
            reading.gain("unjitted", saved, nodes),
            nodes,
        )
