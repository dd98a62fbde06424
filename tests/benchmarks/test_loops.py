"""Other tools' loops train what a loop by hand trains, in turns."""

from functools import partial

import pytest
import torch

from benchmarks import foundation

TURNS, AT_ONCE = 3, 2


@pytest.mark.slow
@pytest.mark.parametrize("name", foundation.PEERS)
def test_the_loop_of_a_peer_is_the_loop_by_hand(name):
    if name == "lightning":  # the others are installed for the tests
        pytest.importorskip(name)
    total, data = 100, foundation._batches(4)
    recipe = {
        "optimizer": foundation._optimizer, "scale": partial(foundation._scale, total), "clip": foundation.CLIP,
        "steps": total,
    }  # fmt: skip
    model = foundation._model()
    turn = foundation.PEERS[name](model, data, AT_ONCE, recipe)
    for _ in range(TURNS):
        turn()
    trained = {key: value.detach().clone() for key, value in model.named_parameters()}
    ahead = 1 if name == "lightning" else 0  # it asks for a batch before it trains on the one before it
    own = foundation._model()
    foundation._plain(own, data, total)(0, TURNS * AT_ONCE - ahead)
    for key, value in own.named_parameters():
        torch.testing.assert_close(trained[key], value.detach(), rtol=1e-4, atol=1e-5)
