"""Drafters: what prompt lookup finds, by definition, and which drafters are refused."""

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shoestring.core.errors import ConfigError
from shoestring.decode.drafters import open_drafter
from shoestring.decode.drafters.lookup import LONGEST, PromptLookup
from shoestring.decode.settings.generation import Speculation
from shoestring.models.gpt import GPT, tiny
from shoestring.models.saving import save_model


def searched(history):
    """Where the newest occurrence of the longest passage at the end continued, by looking everywhere."""
    for length in range(min(LONGEST, len(history)), 0, -1):
        for end in range(len(history) - 1, length - 1, -1):
            if history[end - length : end] == history[-length:]:
                return length, end
    return 0, 0


@given(st.lists(st.integers(0, 3), min_size=1, max_size=40), st.lists(st.integers(0, 3), max_size=20))
def test_lookup_finds_the_newest_longest_passage_while_the_text_grows(prompt, more):
    drafter, row = PromptLookup(), SimpleNamespace(slot=0, history=list(prompt))
    for token in [None, *more]:
        row.history += [] if token is None else [token]
        length, place = searched(row.history)
        assert drafter.grades([row]) == [length - 1]
        (draft,) = drafter.draft([row], [6])
        copied = list(row.history)
        for step in range(6 if length else 0):
            copied.append(copied[place + step])
        assert draft.tokens == copied[len(row.history) :]
        assert draft.q is None


def test_lookup_forgets_the_text_that_was_in_the_slot_before():
    drafter = PromptLookup()
    assert drafter.grades([SimpleNamespace(slot=0, history=[1, 2, 1])]) == [0]
    assert drafter.grades([SimpleNamespace(slot=0, history=[5, 1])]) == [-1]


def test_drafters_are_opened_by_name_and_one_with_another_vocabulary_is_refused(tmp_path):
    model = tiny(vocab_size=64)
    for words in (64, 65):
        save_model(tiny(vocab_size=words, layers=1), None, tmp_path / str(words), {})
    assert open_drafter(Speculation(), model, None) is None
    assert isinstance(open_drafter(Speculation(draft="lookup"), model, None), PromptLookup)
    drafter = open_drafter(Speculation(draft=str(tmp_path / "64")), model, None, slots=2, room=32)
    assert isinstance(drafter.model.model, GPT)
    with pytest.raises(ConfigError, match="vocabulary of 65 tokens, but the model has 64"):
        open_drafter(Speculation(draft=str(tmp_path / "65")), model, None)
    assert torch.is_grad_enabled()


def test_a_drafter_is_put_where_the_model_is_and_takes_its_data_type_if_asked_to(tmp_path):
    save_model(tiny(vocab_size=64, layers=1), None, tmp_path, {})
    for dtype, device, wanted in (("own", "cpu", torch.float32), ("model", "meta", torch.bfloat16)):
        model = tiny(vocab_size=64).to(device, torch.bfloat16)
        drafter = open_drafter(Speculation(draft=str(tmp_path), draft_dtype=dtype), model, None)
        assert {(weight.device.type, weight.dtype) for weight in drafter.model.model.parameters()} == {(device, wanted)}
        assert drafter.model.device.type == device
    with pytest.raises(ConfigError, match="draft_dtype is float32"):
        Speculation(draft_dtype="float32")
