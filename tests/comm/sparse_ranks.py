"""What must hold of every codec that sends a part of the entries and keeps the rest for later."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch

from shoestring.comm.codecs.codec import AllGather, AllToAll, Codec, ExchangeContext, Grads, Mean, advance
from shoestring.comm.codecs.lockstep import run_lockstep

SHAPES = {"matrix": (37, 40), "bias": (7,), "none": (0, 4), "long": (1030,), "conv": (6, 4, 3, 3), "scalar": ()}
RANKS = 3

Make = Callable[[], Codec]


def gradients(seed: int, ranks: int = RANKS, dtype: torch.dtype = torch.float32) -> list[Grads]:
    """Of sizes that differ between layers, with heavy tails, and zeros where a row had no use."""
    generator = torch.Generator().manual_seed(seed)
    found = [
        {name: (i + 1) * torch.randn(shape, generator=generator) ** 3 for i, (name, shape) in enumerate(SHAPES.items())}
        for _ in range(ranks)
    ]
    for grads in found:
        grads["matrix"][5] = 0
    return [{name: grad.to(dtype) for name, grad in grads.items()} for grads in found]


def mean(grads: list[Grads]) -> Grads:
    return {name: torch.stack([each[name].double() for each in grads]).mean(0) for name in grads[0]}


def mean_state(codecs: list[Codec], kind: str, name: str) -> torch.Tensor:
    """Zeros of a parameter that travels whole."""
    kept = [codec.state.get(kind, {}).get(name, torch.zeros(SHAPES[name])) for codec in codecs]
    return torch.stack(kept).double().mean(0)


def totals(codecs: Sequence[Codec], gradients: Callable[[int], list[Grads]], steps: int) -> tuple[Grads, Grads]:
    """(what the codecs decoded, the means of what they were given), each summed over the steps."""
    sent, total = ({name: torch.zeros_like(grad) for name, grad in gradients(0)[0].items()} for _ in range(2))
    for step in range(steps):
        grads = gradients(step)
        for name, grad in total.items():
            grad += torch.stack([each[name] for each in grads]).mean(0)
        run_lockstep(codecs, grads, step)
        for name, grad in sent.items():
            grad += grads[0][name]
    return sent, total


def cloned(state: dict) -> dict:
    return {kind: {name: tensor.clone() for name, tensor in of.items()} for kind, of in state.items()}


def assert_conserves(make: Make, steps: int = 6) -> None:
    """mean(sent) + mean(e_new) = mean(g) + mean(e_old), at every step."""
    codecs = [make() for _ in range(RANKS)]
    residual = {name: torch.zeros(shape, dtype=torch.float64) for name, shape in SHAPES.items()}
    for step in range(steps):
        grads = gradients(step)
        total = {name: grad + residual[name] for name, grad in mean(grads).items()}
        run_lockstep(codecs, grads, step)
        residual = {name: mean_state(codecs, "residual", name) for name in SHAPES}
        for name in SHAPES:
            torch.testing.assert_close(grads[0][name].double() + residual[name], total[name], rtol=2e-6, atol=1e-5)
    assert any(each.abs().max() > 1e-3 for each in residual.values() if each.numel())  # else it would pass idly


def assert_replicas_equal(make: Make, dtype: torch.dtype = torch.float32, steps: int = 8) -> None:
    codecs = [make() for _ in range(RANKS)]
    for step in range(steps):
        grads = gradients(step, dtype=dtype)
        run_lockstep(codecs, grads, step)
        for name in SHAPES:
            assert all(torch.equal(grads[0][name], each[name]) for each in grads)
            assert grads[0][name].dtype == dtype
    for kind in codecs[0].shared:
        for name, tensor in codecs[0].state.get(kind, {}).items():
            assert all(torch.equal(tensor, codec.state[kind][name]) for codec in codecs)


def assert_untouched_when_given_up(make: Make) -> None:
    """A gradient that is not finite ends the exchange at its first yield, and must leave no mark; nor must an end."""
    codecs = [make() for _ in range(RANKS)]
    for step in range(3):
        run_lockstep(codecs, gradients(step), step)
    other = [make() for _ in range(RANKS)]
    for codec, twin in zip(codecs, other, strict=True):
        twin.load_state_dict(cloned(codec.state_dict()))
    for value in (float("nan"), float("inf"), 1.0):
        before = cloned(codecs[1].state_dict())
        grads = gradients(9)[1]
        grads["long"][1000] = value
        coding = codecs[1].code(grads, ExchangeContext(1, RANKS, 3))
        advance(coding)
        coding.close()
        for kind, of_kind in before.items():
            assert of_kind.keys() == codecs[1].state[kind].keys()
            assert all(torch.equal(codecs[1].state[kind][name], tensor) for name, tensor in of_kind.items())
    for step in (3, 4):  # and continues as one that was loaded from a checkpoint does
        mine, theirs = gradients(step), gradients(step)
        run_lockstep(codecs, mine, step)
        run_lockstep(other, theirs, step)
        assert all(torch.equal(mine[0][name], theirs[0][name]) for name in SHAPES)


def assert_exposes(make: Make, name: str, at: int) -> None:
    """An entry that is not finite, of any rank, is in the first answers of every rank."""
    for value in (float("nan"), float("inf"), -float("inf")):
        for rank in range(RANKS):
            grads = gradients(1)
            asked = []
            grads[rank][name].view(-1)[at] = value
            for reader, each in enumerate(grads):
                asked.append(advance(make().code(each, ExchangeContext(reader, RANKS, 0))))
            for reader in range(RANKS):
                answers = [answer(requests, reader) for requests in zip(*asked, strict=True)]
                assert not all(each.isfinite().all() for each in answers if each.is_floating_point())
    asked = [advance(make().code(each, ExchangeContext(0, RANKS, 0))) for each in gradients(1)]
    assert all(request.tensor.isfinite().all() for requests in asked for request in requests)


def answer(requests: tuple, reader: int) -> torch.Tensor:
    match requests[0]:
        case AllToAll():
            return torch.stack([request.tensor[reader] for request in requests])
        case AllGather() | Mean():
            return torch.stack([request.tensor for request in requests])


def assert_merging_conserves(make: Make) -> None:
    """A run of three ranks continues with two: the residuals are kept."""
    codecs = [make() for _ in range(RANKS)]
    for step in range(3):
        run_lockstep(codecs, gradients(step), step)
    merged = codecs[0].merge_states([cloned(codec.state_dict()) for codec in codecs])
    fewer = [make() for _ in range(2)]
    for codec in fewer:
        codec.load_state_dict(merged)
    for name in SHAPES:
        expected = mean_state(codecs, "residual", name)
        torch.testing.assert_close(mean_state(fewer, "residual", name), expected, rtol=1e-6, atol=1e-6)
    grads = gradients(5, ranks=2)
    total = {name: grad + mean_state(codecs, "residual", name) for name, grad in mean(grads).items()}
    run_lockstep(fewer, grads, 5)
    for name in SHAPES:
        left = mean_state(fewer, "residual", name)
        torch.testing.assert_close(grads[1][name].double() + left, total[name], rtol=2e-6, atol=1e-5)


def assert_takes_nothing(make: Make) -> None:
    run_lockstep([make() for _ in range(2)], [{"none": torch.zeros(0, 4)} for _ in range(2)])
    single = [{"w": torch.randn(5), "one": torch.tensor(2.0)}]
    run_lockstep([make()], single)


def assert_survives_other_cohorts(make: Make) -> None:
    """The same parameters in other company: state goes by name."""
    codecs = [make() for _ in range(RANKS)]
    run_lockstep(codecs, gradients(0))
    residual = {name: mean_state(codecs, "residual", name) for name in SHAPES}
    for names in (["long", "bias"], ["matrix", "conv", "none", "scalar"]):
        grads = [{name: each[name] for name in names} for each in gradients(1)]
        total = {name: grad + residual[name] for name, grad in mean(grads).items()}
        run_lockstep(codecs, grads, 1)
        for name in names:
            left = mean_state(codecs, "residual", name)
            torch.testing.assert_close(grads[0][name].double() + left, total[name], rtol=2e-6, atol=1e-5)
    room = sum(each.untyped_storage().nbytes() for codec in codecs for each in codec._buffers.values())
    assert room <= 4 * RANKS * sum(torch.Size(shape).numel() for shape in SHAPES.values())


# -- the same as classes of tests; `make` is parametrized over the variants of a codec ---------------------------------


class Contract:
    """What holds of every codec here."""

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_replicas_are_equal(self, make, dtype):
        assert_replicas_equal(make, dtype)

    def test_giving_up_leaves_what_was(self, make):
        assert_untouched_when_given_up(make)

    def test_shows_what_is_not_finite(self, make):
        assert_exposes(make, "matrix", 39)

    def test_takes_nothing(self, make):
        assert_takes_nothing(make)


class ConservingContract:
    """What holds of those whose residual is what was not sent, as it was."""

    def test_conserves(self, make):
        assert_conserves(make)

    def test_merging_conserves(self, make):
        assert_merging_conserves(make)

    def test_survives_other_cohorts(self, make):
        assert_survives_other_cohorts(make)
