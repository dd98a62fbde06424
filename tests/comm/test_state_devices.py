"""A checkpoint is read into this host's memory; state goes on where the gradients are."""

import torch

from shoestring.comm.codecs.powersgd import PowerSGDCodec
from shoestring.comm.codecs.sign import SignCodec


def test_state_is_where_the_gradient_is():
    codec = SignCodec()
    codec.load_state_dict({"residual": {"a": torch.ones(3)}})
    found = codec.get_state("residual", "a", torch.zeros(3, device="meta"))
    assert found.device.type == "meta" and codec.state["residual"]["a"] is found


def test_so_are_the_bases_of_powersgd():
    for alternate, kind, shape in ((False, "Qt", (2, 8)), (True, "P", (6, 2))):
        codec = PowerSGDCodec(2, alternate=alternate)
        codec.load_state_dict({"residual": {"a": torch.ones(6, 8)}, kind: {"a": torch.ones(shape)}})
        matrix = codec._matrix("a", torch.zeros(6, 8, device="meta"))
        assert matrix.basis.device.type == matrix.residual.device.type == "meta"
