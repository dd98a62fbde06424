"""Finds the tokens by which a model that is trained on chats learns to end its answers."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError

from shoestring.data.chats import FILES, ChatDataset
from shoestring.data.joined import Joined
from shoestring.data.tokenizer import Tokenizer
from shoestring.storage import foreign

log = logging.getLogger("shoestring")

_BLANKS = 8
"""Maximum number of white space tokens that may be trained on after the token that ends an answer."""
_INNER = 0.01
"""Maximum fraction of a special token's occurrences that may lie inside answers; a token that occurs inside more often
is not regarded as ending answers."""


def ends_learnt(train: Any, tokenizer: Tokenizer) -> list[int]:
    """Ids of the tokens by which a model trained on the data set ends a text: for chats, the result of
    `ends_of_answers`; for other text, the end-of-text token.
    """
    parts = train.parts if isinstance(train, Joined) else [train]
    of_parts = [_of_file(part.path, tokenizer) if isinstance(part, ChatDataset) else tokenizer.ends for part in parts]
    return sorted({end for ends in of_parts for end in ends})


def ends_learnt_in(run: Path, tokenizer: Tokenizer) -> list[int]:
    """Ids of the tokens that end the answers in the prepared chats of a run folder; damaged files are skipped, with a
    warning."""
    ends: set[int] = set()
    for path in (run / FILES[0], *run.glob(f"data/*/{FILES[0]}")):
        try:
            ends.update(_of_file(path, tokenizer) if path.exists() else [])
        except (OSError, SafetensorError, IndexError) as error:
            log.warning("not used: `%s`: %s", path, error)
    return sorted(ends)


def _of_file(path: Path, tokenizer: Tokenizer) -> list[int]:
    with foreign.open_safetensors(path, "numpy") as file:
        tokens, trained, starts = map(file.get_tensor, ("tokens", "trained", "starts"))
    return ends_of_answers(tokens, trained, starts, tokenizer)


def ends_of_answers(
    tokens: np.ndarray, trained: np.ndarray, starts: Sequence[int] | np.ndarray, tokenizer: Tokenizer
) -> list[int]:
    """Ids of the special tokens that end answers, such as `<|im_end|>`; white space after them is ignored.

    A token is left out if answers often continue after it, such as a token between the channels of a message.

    Args:
        tokens: the tokens of all chats, (n,).
        trained: flags of the tokens that are trained on, (n,).
        starts: index of the first token of each chat.
    """
    tokens = np.asarray(tokens)
    added = tokenizer.engine.get_added_tokens_decoder()
    special = [*tokenizer.ends, *(number for number, token in added.items() if token.special)]
    follows = np.append(np.asarray(trained, bool)[1:], False)  # whether the next token belongs to the same answer
    begins = np.asarray(starts, np.int64)
    follows[begins[(begins > 0) & (begins <= len(tokens))] - 1] = False
    # An end-of-text token decodes to the empty string, so it is blank too; it may follow the token that ends a message.
    blank = {int(token): not tokenizer.decode([int(token)]).strip() for token in np.unique(tokens[1:][follows[:-1]])}
    places = np.flatnonzero(np.asarray(trained, bool) & np.isin(tokens, special))
    counts: dict[int, list[int]] = {}
    for place in places.tolist():
        behind = place
        while behind - place < _BLANKS and follows[behind] and blank[int(tokens[behind + 1])]:
            behind += 1
        counts.setdefault(int(tokens[place]), [0, 0])[int(follows[behind])] += 1
    return sorted(token for token, (ending, inner) in counts.items() if ending and inner <= _INNER * (ending + inner))
