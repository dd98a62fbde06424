"""A package of a user's own, with a feature that publishes a number and adds to the report."""

from dataclasses import dataclass
from typing import ClassVar

import shoestring as ss


@dataclass(frozen=True, kw_only=True)
class Flips(ss.Feature):
    """Publish a number at each step, and show it."""

    seams: ClassVar = (ss.Seam.STEP,)

    def apply(self, attachments, seam):
        def publish() -> None:
            attachments.numbers["flips"] = 1 / (1 + attachments.progress.step)

        attachments.at(ss.Phase.CAPTURE, publish)

    def report_items(self, trace):
        rows = (("all", trace.steps), ("<b>", 0.5))
        return ss.Table(title="Layers", head=("Layer", "Steps"), rows=rows), ss.Curve(
            title="Flip rate", metrics={"flips": "all layers"}, unit="share"
        )
