"""Trees of training programs, written line by line, for analyses to read."""

from shoestring.profile.analyses import ANALYSES
from shoestring.profile.analyses.reading import Reading
from shoestring.profile.recording import Facts, Profile
from shoestring.profile.tree import ENGINE, NodeKind, TreeBuilder

FILE = "/home/me/train.py"
TORCH = "/opt/lib/python3.11/site-packages/torch"
MILLISECOND = 1_000_000
BIG = "float32[512,256] -> float32[512,256]"


class Program:
    """A tree of a training loop, written line by line; times are in milliseconds of all calls."""

    def __init__(self, steps=100):
        self.builder, self.steps = TreeBuilder(), steps
        self.sources, self.facts = {}, Facts()
        self.module = self.builder.node(0, NodeKind.PYTHON, f"{FILE}\t<module>", 90)

    def write(self, number, text):
        """The text of the program, from this line on."""
        self.sources[FILE] = "\n" * (number - 1) + text

    def line(self, number, function="train", above=None, python=0.0):
        node = self.builder.node(
            self.module if above is None else above, NodeKind.PYTHON, f"{FILE}\t{function}", number
        )
        self.builder.add(node, own=round(python * MILLISECOND))
        return node

    def library(self, above, file, function, python=0.0):
        node = self.builder.node(above, NodeKind.PYTHON, f"{TORCH}/{file}\t{function}", 7)
        self.builder.add(node, own=round(python * MILLISECOND))
        return node

    def call(self, above, name, forward, backward=0.0, count=0, kind=NodeKind.OPERATOR, gradient="", **columns):
        count = count or self.steps
        node = self.builder.node(above, kind, name if kind == NodeKind.SPAN else f"aten::{name}")
        own = round(forward * MILLISECOND)
        self.builder.add(node, count=count, own=own, least=own // count, **columns)
        if backward:
            engine = self.builder.node(self.line(99), NodeKind.OPERATOR, f"{ENGINE}{name}Backward0")
            link = self.builder.node(engine, NodeKind.LINK, "", 0, node)
            function = self.builder.node(link, NodeKind.BACKWARD, f"{name}Backward0")
            own = round(backward * MILLISECOND)
            self.builder.add(function, count=count, own=own, least=own // count)
            if gradient:
                self.builder.node(function, NodeKind.OPERATOR, f"aten::{gradient}")
        return node

    def model(self, milliseconds=50.0):
        """What a model usually does: products on lines of their own."""
        for number in (110, 111, 112):
            self.call(self.line(number, "forward"), "linear", milliseconds / 9, 2 * milliseconds / 9, flops=10**9)
        return self

    def profile(self):
        return Profile(self.builder.build(), self.facts, self.sources)

    def found(self, analysis):
        return list(ANALYSES[analysis](Reading(self.profile())))


def only(findings, line):
    assert [finding.file for finding in findings] == [FILE]
    assert findings[0].line == line
    assert findings[0].evidence.endswith(".")
    assert findings[0].advice.endswith(".")
    return findings[0]
