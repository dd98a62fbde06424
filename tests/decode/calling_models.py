"""A model that writes chosen answers, and a server of it."""

from types import SimpleNamespace

import torch
from torch import Tensor, nn

from shoestring.data.tokenizer import Tokenizer
from tests.decode.calling_templates import BEGIN, tokenizer
from tests.decode.small_server import running


class Scripted(nn.Module):
    """A model that almost surely writes chosen texts: the first answer of a conversation is the first of `answers`,
    and so on. Like any model, it computes the logits (B, T, V) of tokens (B, T), and knows nothing but these tokens."""

    def __init__(self, tokenizer: Tokenizer, context: int = 4096) -> None:
        super().__init__()
        self.config = SimpleNamespace(context=context, vocab_size=tokenizer.vocab_size)
        self.tokenizer = tokenizer
        self.begin = self.tokens(BEGIN)
        self.answers: list[str] = []

    def tokens(self, text: str) -> list[int]:
        return self.tokenizer.encode_prompt(text, add_special_tokens=False) if text else []

    def forward(self, tokens: Tensor) -> Tensor:
        answers = [[*self.tokens(answer), self.tokenizer.end_of_text] for answer in self.answers]
        following = [self._following(row, answers) for row in tokens.tolist()]
        logits = torch.full((*tokens.shape, self.config.vocab_size), -1e4)
        return logits.scatter_(2, torch.tensor(following)[..., None], 1e4)

    def _following(self, row: list[int], answers: list[list[int]]) -> list[int]:
        """For each token of a row, the token that follows it."""
        following, written, count = list[int](), list[int](), 0
        for position in range(1, len(row) + 1):
            if row[position - len(self.begin) : position] == self.begin:
                written, count = answers[count % len(answers)], count + 1
            following.append(written[0] if written else self.tokenizer.end_of_text)
            written = written[1:]
        return following


def calling_server(form: str, **settings):
    """A server of a `Scripted` model that calls tools in the given form, or by the given chat template."""
    tokens = tokenizer(form)
    return running(tokens=tokens, built=Scripted(tokens), context=4096, **settings)
