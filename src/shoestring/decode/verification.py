"""Which drafted tokens stay, and what follows them, so that the text keeps the distribution of the model alone.

Throughout, γ tokens were drafted after a verified text; p (γ + 1, V) is the model's distribution at each drafted
position and at the one after, q (γ, V) the drafter's, from which the tokens were drawn. Rows of p and q after the first
depend on the drafted tokens before them.

Token verification: Leviathan et al. 2023, Chen et al. 2023. Block verification: Sun et al. 2025, which never accepts
fewer tokens on average. Both take as given that the number of drafted tokens was decided without a look at what was
drawn last: a drafter may stop after a token, but must not leave out a token that it has drawn.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class Verdict(NamedTuple):
    """`accepted` drafted tokens stay; the token after them is drawn from `following` (V,)."""

    accepted: int
    following: Tensor


def common_prefix(draft: Sequence[int], chosen: Sequence[int]) -> int:
    """How many drafted tokens are those that the model chose at their positions.

    This is the whole of invariant verification: the model's tokens are drawn, as without drafts, by the random numbers
    of their positions, and the drafter drew by the same numbers. Greedy decoding is the case without numbers.
    """
    for accepted, (drafted, token) in enumerate(zip(draft, chosen, strict=False)):
        if drafted != token:
            return accepted
    return min(len(draft), len(chosen))


def token_acceptance(p: Tensor, q: Tensor, draft: Sequence[int]) -> Tensor:
    """The probability (γ,) with which each drafted token stays, given that those before it do: min(1, p / q)."""
    index = torch.tensor(draft, dtype=torch.int64, device=p.device)[:, None]
    return (p[:-1].gather(1, index) / q.gather(1, index)).squeeze(1).clamp(max=1.0)


def verify_tokens(p: Tensor, q: Tensor, draft: Sequence[int], coins: Sequence[float]) -> Verdict:
    """Accept the tokens from the first on, until a coin, uniform in (0, 1), is not below a token's acceptance."""
    accepted = len(draft)
    for position, chance in enumerate(token_acceptance(p, q, draft).tolist()):
        if not coins[position] < chance:
            accepted = position
            break
    return Verdict(accepted, _following(p, q, accepted, 1.0))


def block_acceptance(p: Tensor, q: Tensor, draft: Sequence[int]) -> tuple[list[float], list[float]]:
    """For each number of tokens from 1 to γ: the probability of keeping so many where no larger number is kept, and
    the share of the drafted prefix's probability that the model supports, from 0 tokens on (γ + 1 numbers)."""
    index = torch.tensor(draft, dtype=torch.int64, device=p.device)[:, None]
    ratios = (p[:-1].gather(1, index) / q.gather(1, index)).flatten().tolist()
    supports, acceptance = [1.0], []
    for ratio in ratios:
        supports.append(min(supports[-1] * ratio, 1.0))
    scale = torch.tensor(supports[1:-1], dtype=p.dtype, device=p.device)[:, None]
    for support, residual in zip(supports[1:-1], _excess(scale * p[1:-1], q[1:]).sum(-1).tolist(), strict=True):
        whole = residual + 1 - support
        # Both are zero where the drafter equals the model there: the next token is then kept with certainty.
        acceptance.append(residual / whole if whole > 0 else 1.0)
    return [*acceptance, supports[-1]][: len(draft)], supports


def verify_block(p: Tensor, q: Tensor, draft: Sequence[int], coins: Sequence[float]) -> Verdict:
    """Accept as many tokens as the largest number whose coin, uniform in (0, 1), is below its acceptance."""
    acceptance, supports = block_acceptance(p, q, draft)
    accepted = max((n for n, chance in enumerate(acceptance, start=1) if coins[n - 1] < chance), default=0)
    return Verdict(accepted, _following(p, q, accepted, supports[accepted]))


def one_hot(draft: Sequence[int], p: Tensor) -> Tensor:
    """The distributions (γ, V) of a drafter that was certain of each of its tokens."""
    index = torch.tensor(draft, dtype=torch.int64, device=p.device)
    return torch.zeros(len(draft), p.shape[1], dtype=p.dtype, device=p.device).scatter_(1, index[:, None], 1.0)


def _following(p: Tensor, q: Tensor, accepted: int, support: float) -> Tensor:
    """The normalized part of the model's distribution that the drafter's leaves; all of it after the last draft."""
    if accepted == len(q):
        return p[accepted]
    residual = _excess(support * p[accepted], q[accepted])
    total = residual.sum()
    # Nothing is left where the two are equal, and then rounding alone brought us here.
    return residual / total if total > 0 else p[accepted]


def _excess(p: Tensor, q: Tensor) -> Tensor:
    return (p - q).clamp_(min=0.0)
