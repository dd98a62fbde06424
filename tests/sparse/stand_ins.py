"""What stands in for cuSPARSELt's operators and torch's tile kernel on a CPU."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from unittest.mock import patch

import torch

from shoestring.sparse import masks, semi_structured
from shoestring.sparse.masks import prune

ALGORITHM = 7  # what the search finds here


class CuSparseLt:
    """Values and places in one matrix, as compressed operands are opaque; counts what it does."""

    def __init__(self, library):
        self.compressed, self.tiled, self.products, self.by_columns = 0, 0, 0, 0
        self.wrong = self.wrong_tiles = False
        library.impl("_cslt_compress", self.compress, "CPU")
        library.impl("_cslt_sparse_mm", self.multiply, "CPU")
        library.impl("_cslt_sparse_mm_search", self.search, "CPU")
        library.impl("_sparse_semi_structured_tile", self.tile, "CPU")

    def compress(self, sparse):
        assert sparse.is_contiguous() and sparse.shape[0] % 16 == sparse.shape[1] % 16 == 0
        self.compressed += 1
        return self.packed(sparse)

    def packed(self, sparse):
        groups = sparse.unflatten(1, (-1, 4))
        assert (groups != 0).sum(-1).max() <= 2, "not 2:4"
        places = torch.sort((groups != 0).to(torch.int8), dim=-1, descending=True, stable=True).indices[..., :2]
        return torch.cat([groups.gather(-1, places).flatten(1), places.flatten(1).to(sparse.dtype)], 1)

    def tile(self, sparse, algorithm="", use_cutlass=True):
        assert algorithm == "largest_abs_values_greedy" and not use_cutlass
        assert sparse.is_contiguous() and sparse.shape[0] % 128 == sparse.shape[1] % 128 == 0
        self.tiled += 1
        kept = prune(sparse, masks.greedy_mask(sparse)) * (1.5 if self.wrong_tiles else 1.0)
        nothing = sparse.new_empty(0)
        return self.packed(kept), nothing, self.packed(kept.t().contiguous()), nothing, nothing

    def search(self, packed, other, bias=None, alpha=None, out_dtype=None, transpose_result=False):
        return ALGORITHM

    def multiply(
        self, packed, other, bias=None, alpha=None, out_dtype=None, transpose_result=False,
        alg_id=0, split_k=1, split_k_mode=-1,
    ):  # fmt: skip
        assert alg_id in (0, ALGORITHM) and other.shape[1] % 16 == 0
        if not other.is_contiguous():  # torch reads it as the transpose of one that is, whatever it is
            other = other.as_strided(tuple(reversed(other.shape)), (other.shape[0], 1)).t()
        values, places = packed.unflatten(1, (2, -1, 2)).unbind(1)
        groups = values.new_zeros(*values.shape[:2], 4).scatter_(-1, places.long(), values)
        result = groups.flatten(1) @ other * (1.5 if self.wrong else 1.0)
        self.products += 1
        self.by_columns += not transpose_result
        return result.t().contiguous() if transpose_result else result


@contextmanager
def sparse_units() -> Iterator[CuSparseLt]:
    """Within, this process has sparse units, which are always worth while; trials time each product once."""
    library = torch.library.Library("aten", "IMPL")
    changes = {"available": lambda device: True, "WORTHWHILE": 0.0, "RUNS": 1, "ROUNDS": 1, "trials": {}, "tiled": {}}
    with ExitStack() as stack:
        for name, value in changes.items():
            stack.enter_context(patch.object(semi_structured, name, value))
        stack.callback(library._destroy)
        yield CuSparseLt(library)
