"""Analysis of thread oversubscription: more threads compute than there are cores, so threads wait for each other."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from shoestring.profile.analyses.reading import Place, Reading
from shoestring.profile.analyses.statements import called
from shoestring.profile.findings import Finding
from shoestring.profile.tree import NodeKind

SHARE = 0.2
"""The number of threads is reported only if operators take at least this share of the profiled time."""
TOO_MANY = 1.5
"""The number of threads is reported if at least this many threads compute per core."""


def too_many_threads(reading: Reading) -> Iterator[Finding]:
    """Find the line that sets too many threads, or else the line that computes most in too many Python threads."""
    facts = reading.profile.facts
    calls = [call for call in reading.calls if call.place[0]]
    taken = sum(call.time for call in calls)
    if not facts.cores or not facts.threads or reading.share(taken) < SHARE:
        return
    beside = max(1.0, reading.total / 1e9 / max(facts.seconds - facts.overhead, 1e-9))
    wanted = facts.threads if beside < TOO_MANY else facts.threads * beside
    if wanted < TOO_MANY * facts.cores:
        return
    own = "" if beside < TOO_MANY else f", in {beside:.1f} threads of the program at a time"
    # The first line, in functions that ran, that may set the number of threads too high.
    tree, settings = reading.tree, list[Place]()
    ran = {tree.names[name] for name in set(tree.name[tree.kind == NodeKind.PYTHON].tolist())}
    functions = {(name.partition("\t")[0], name.rpartition(".")[2].rpartition("\t")[2]) for name in ran}
    for file in reading.profile.sources:
        text = reading.syntax(file)
        for node in ast.walk(text.module) if text else ():
            if not (isinstance(node, ast.Call) and "set_num_threads" in called(node) and node.args):
                continue
            assert text is not None
            within = (file, getattr(text.function(node), "name", "<module>"))
            number = node.args[0]
            large = not isinstance(number, ast.Name)  # a variable usually restores an earlier number
            if isinstance(number, ast.Constant):
                large = isinstance(number.value, int) and number.value > facts.cores
            if within in functions and large:
                settings.append((file, node.lineno))
    setting = min(settings, default=None)
    if setting is None and beside >= TOO_MANY:
        setting = max(calls, key=lambda call: call.time).place
    yield reading.finding(
        "more threads compute than there are cores",
        setting or ("", 0),
        f"torch used {facts.threads} threads for an operator{own}, on {facts.cores} cores.",
        "Set as many threads for an operator (torch.set_num_threads, OMP_NUM_THREADS) as there are cores for each"
        " process or thread that computes.",
        None,
        [call.node for call in sorted(calls, key=lambda call: -call.time)[:3]],
    )
