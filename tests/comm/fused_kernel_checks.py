"""What the kernel of `fused` must do; run as a script where Triton interprets it, and by tests on a GPU."""

from __future__ import annotations

from dataclasses import replace

import torch

from shoestring.comm.codecs.fused import Taken, WeightedSum, take_entries


def take_by_torch(terms: WeightedSum, threshold: torch.Tensor, room: int) -> Taken:
    """What `take` must do; where there is no room for all, it may take others."""
    M = terms.build()
    tell = 0 * M.sum()
    hits = (M.abs() > threshold).nonzero().view(-1)
    indices = hits[:room]
    values = M[indices]
    M[indices] = 0
    return Taken(indices, values, len(hits) <= room, tell)


def drawn(n: int, device: str) -> list[torch.Tensor]:
    """Gradient, residual and velocity, from the second entry of their memory on: nothing is aligned."""
    generator = torch.Generator().manual_seed(n)
    return [torch.randn(n + 1, generator=generator)[1:].to(device) for _ in range(3)]


def assert_takes_all(device: str, n: int, threshold: float, momentum: bool) -> None:
    """Bit by bit what torch does where nothing is multiplied, and within its rounding otherwise."""
    g, e, u = drawn(n, device)
    terms = WeightedSum(g, e, u, 1.9, 0.9) if momentum else WeightedSum(g, e)
    expected = replace(terms, g=g.clone())
    bound = torch.tensor(threshold, device=device)
    theirs, ours = take_by_torch(expected, bound, n), take_entries(terms, bound, n)
    tolerance = 1e-6 if momentum else 0.0
    assert torch.equal(ours.indices, theirs.indices)
    torch.testing.assert_close(ours.values, theirs.values, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(terms.g, expected.g, rtol=tolerance, atol=tolerance)
    assert ours.complete
    assert float(ours.poison) == 0
    assert torch.equal(e, drawn(n, device)[1])


def assert_leaves_what_finds_no_room(device: str) -> None:
    g, e, _ = drawn(9000, device)
    M, terms = g + e, WeightedSum(g, e)
    taken = take_entries(terms, torch.tensor(1.0, device=device), 100)
    assert not taken.complete
    assert len(taken.indices) == 100
    assert (taken.indices.diff() > 0).all()
    assert (taken.values.abs() > 1).all()
    assert not g[taken.indices].any()
    taken.put_back(g)
    assert torch.equal(g, M)


def assert_tells(device: str) -> None:
    for value in (float("nan"), float("inf"), -float("inf")):
        g, e, _ = drawn(5000, device)
        g[4500] = value
        assert take_entries(WeightedSum(g, e), torch.tensor(3.0, device=device), 5000).poison.isnan()


def main(device: str) -> None:
    for n in (1, 2047, 2048, 9000):
        for threshold in (-1.0, 1.5, 100.0):
            for momentum in (False, True):
                assert_takes_all(device, n, threshold, momentum)
    assert_leaves_what_finds_no_room(device)
    assert_tells(device)


if __name__ == "__main__":
    main("cpu")
    print("as it must be")
