"""Which line a sampling profiler names, by the stacks that it writes."""

from benchmarks.profile.findings import Found, Judged
from benchmarks.profile.peers import by_line, first_of

FOLDER = "benchmarks/profile/blind5/"


def test_a_stack_counts_for_its_innermost_line_in_the_set():
    stacks = [
        f"main (/x/peers.py:3);run (/x/{FOLDER}a.py:10);inner (/x/{FOLDER}a.py:20);mul (/lib/torch/x.py:5) 7",
        f"main (/x/peers.py:3);run (/x/{FOLDER}a.py:10) 2",
        "main (/x/peers.py:3);other (/lib/y.py:10) 100",
        f"main (/x/peers.py:3);<module> (/x/{FOLDER}__init__.py:11);<module> (/x/{FOLDER}a.py:2);draw (/lib/y.py:1) 9",
        f"MainThread;run (/x/{FOLDER}a.py:20);operator() (native.cpp) 1",
    ]
    counts = by_line(stacks, FOLDER)
    assert counts == {(f"{FOLDER}a.py", 20): 8, (f"{FOLDER}a.py", 10): 2}
    assert counts.most_common(1)[0][0] == (f"{FOLDER}a.py", 20)


def test_ours_is_the_finding_with_the_largest_gain():
    found = [
        Found("hotspot", "a.py", 1, (0.1, 0.2)),
        Found("layout", "a.py", 2, (0.3, 0.4)),
        Found("loading", "a.py", 3, None),
    ]
    judged = Judged("one", "blind5", "layout", [("a.py", 2)], found, [])
    assert first_of(judged) == ("a.py", 2)
    assert first_of(Judged("none", "blind5", "layout", [("a.py", 2)], [], [])) is None
