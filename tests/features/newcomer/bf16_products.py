"""Matrix products in bf16 as a pass over the traced graph, as a newcomer writes it from the guide alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import shoestring as ss


@dataclass(frozen=True, kw_only=True)
class BF16Products(ss.Feature):
    """Compute matrix products of fp32 tensors in bf16; all else, and weights, stay in fp32."""

    min_width: int = 1
    """Smallest inner dimension that is cast; a larger value keeps the products of small layers in fp32."""

    seams: ClassVar = (ss.Seam.GRAPH,)

    def apply(self, attachments: ss.Attachments, seam: ss.Seam) -> None:
        from tests.features.newcomer.cast_products import cast_products

        attachments.add_pass(lambda graph: cast_products(graph, self.min_width))
