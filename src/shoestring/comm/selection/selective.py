"""Selective compression (HiPress, Bai et al., SOSP 2021): a codec compresses some gradients; the others are sent
uncompressed."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase

from shoestring.comm.codecs.codec import Codec, Coding, ExchangeContext, Grads
from shoestring.comm.codecs.dense import DenseCodec
from shoestring.comm.codecs.wrapper import Wrapper, run_together


class SelectiveCodec(Wrapper):
    """Applies the codec `inner` to most parameters, and leaves the parameters in `uncompressed` uncompressed. The same
    collectives send both groups.

    Args:
        uncompressed: parameter names, or shell-style patterns of names.
    """

    def __init__(self, inner: Codec, uncompressed: Sequence[str]) -> None:
        super().__init__(inner)
        self.dense, self.uncompressed = DenseCodec(), tuple(uncompressed)

    def code(self, grads: Grads, context: ExchangeContext) -> Coding:
        dense = {name: grad for name, grad in grads.items() if self.is_uncompressed(name)}
        compressed = {name: grad for name, grad in grads.items() if name not in dense}
        shares = ((self.inner, compressed), (self.dense, dense))
        return run_together([codec.code(share, context) for codec, share in shares if share])

    def is_uncompressed(self, name: str) -> bool:
        return any(fnmatchcase(name, pattern) for pattern in self.uncompressed)
