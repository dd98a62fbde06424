"""Verification of drafts: accepts a prefix of the drafted tokens, so that the text keeps the model's distribution.

Notation: γ tokens were drafted after a verified text. p (γ + 1, V) holds the model's distributions at each drafted
position and at the position after them; q (γ, V) holds the drafter's distributions, from which the drafted tokens were
drawn. Rows of p and q after the first depend on the drafted tokens before them.

Token verification follows Leviathan et al., 2023, and Chen et al., 2023. Block verification follows Sun et al., 2025;
on average it never accepts fewer tokens than token verification. Both methods are exact only if the length of a draft
does not depend on its last token: a drafter may stop after a token, but must not drop a token that it has drawn.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class Verdict(NamedTuple):
    """The number of accepted tokens, and the distribution (V,) of the token that follows them."""

    accepted: int
    following: Tensor


def common_prefix(draft: Sequence[int], chosen: Sequence[int]) -> int:
    """Number of leading drafted tokens that equal the model's own tokens at their positions.

    Invariant verification consists of this comparison alone: the model's tokens are drawn with the random numbers of
    their positions, as they would be without drafts, and the drafter has used the same numbers. Greedy decoding is
    verified in the same way, without random numbers.
    """
    for accepted, (drafted, token) in enumerate(zip(draft, chosen, strict=False)):
        if drafted != token:
            return accepted
    return min(len(draft), len(chosen))


def token_acceptance(p: Tensor, q: Tensor, draft: Sequence[int]) -> Tensor:
    """Probability (γ,) that each drafted token is accepted, given that all earlier ones were: min(1, p / q)."""
    index = torch.tensor(draft, dtype=torch.int64, device=p.device)[:, None]
    return (p[:-1].gather(1, index) / q.gather(1, index)).squeeze(1).clamp(max=1.0)


def verify_tokens(p: Tensor, q: Tensor, draft: Sequence[int], coins: Sequence[float]) -> Verdict:
    """Token verification: accept each drafted token in turn if its coin, uniform in (0, 1), is below its acceptance
    probability; stop at the first rejection."""
    accepted = len(draft)
    for position, chance in enumerate(token_acceptance(p, q, draft).tolist()):
        if not coins[position] < chance:
            accepted = position
            break
    return Verdict(accepted, _following(p, q, accepted, 1.0))


def block_acceptance(p: Tensor, q: Tensor, draft: Sequence[int]) -> tuple[list[float], list[float]]:
    """Acceptance probabilities and weights of block verification (Sun et al., 2025).

    Returns:
        Two lists: for n from 1 to γ, the probability of accepting n tokens if no larger number is accepted; and for n
        from 0 to γ, the weight min(w · p / q, 1) of the first n tokens, where w is the weight of the first n - 1.
    """
    index = torch.tensor(draft, dtype=torch.int64, device=p.device)[:, None]
    ratios = (p[:-1].gather(1, index) / q.gather(1, index)).flatten().tolist()
    supports, acceptance = [1.0], []
    for ratio in ratios:
        supports.append(min(supports[-1] * ratio, 1.0))
    scale = torch.tensor(supports[1:-1], dtype=p.dtype, device=p.device)[:, None]
    for support, residual in zip(supports[1:-1], _excess(scale * p[1:-1], q[1:]).sum(-1).tolist(), strict=True):
        whole = residual + 1 - support
        # Numerator and denominator are zero if the drafter's distribution equals the model's at this position; the next
        # token is then certain to be accepted.
        acceptance.append(residual / whole if whole > 0 else 1.0)
    return [*acceptance, supports[-1]][: len(draft)], supports


def verify_block(p: Tensor, q: Tensor, draft: Sequence[int], coins: Sequence[float]) -> Verdict:
    """Block verification: accept n tokens, for the largest n whose coin, uniform in (0, 1), is below the acceptance
    probability of n tokens."""
    acceptance, supports = block_acceptance(p, q, draft)
    accepted = max((n for n, chance in enumerate(acceptance, start=1) if coins[n - 1] < chance), default=0)
    return Verdict(accepted, _following(p, q, accepted, supports[accepted]))


def one_hot(draft: Sequence[int], p: Tensor) -> Tensor:
    """The one-hot distributions (γ, V) of a drafter that chose each token with certainty."""
    index = torch.tensor(draft, dtype=torch.int64, device=p.device)
    return torch.zeros(len(draft), p.shape[1], dtype=p.dtype, device=p.device).scatter_(1, index[:, None], 1.0)


def _following(p: Tensor, q: Tensor, accepted: int, support: float) -> Tensor:
    """The distribution of the token after the accepted ones: the normalized positive part of `support` · p - q at this
    position, or p if all γ tokens were accepted."""
    if accepted == len(q):
        return p[accepted]
    residual = _excess(support * p[accepted], q[accepted])
    total = residual.sum()
    # The residual is 0 if p and q are equal; then only rounding can have rejected the token.
    return residual / total if total > 0 else p[accepted]


def _excess(p: Tensor, q: Tensor) -> Tensor:
    """The positive part of p - q."""
    return (p - q).clamp_(min=0.0)
