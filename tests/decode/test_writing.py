"""Text on its way out: characters are whole, and nothing of a stop string gets out, however the text is cut."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoestring.data.tokenizer import byte_tokenizer, train_bpe
from shoestring.decode.request import TokenLogprob
from shoestring.decode.serve.writing import Writing

TOKENIZERS = (byte_tokenizer(), train_bpe(["abcab caba abc ab ab ca bcab é漢🙂"] * 3, 280))


def written(tokenizer, tokens, stops=()):
    """The pieces that get out, and the tokens with log-probabilities."""
    writing, pieces, shown = Writing(tokenizer.stream(), stops), [], []
    for token in tokens:
        piece = writing.add(token, TokenLogprob(token, 0.0, []))
        pieces.append(piece.text)
        shown += piece.tokens
        if writing.stopped:
            break
    piece = writing.end()
    return [*pieces, piece.text], shown + piece.tokens, writing.stopped


def first_stop(text, stops):
    """Where the text ends: before the stop string that is complete first, the longest of those."""
    ends = [(text.find(stop) + len(stop), text.find(stop)) for stop in stops if stop in text]
    return min(ends)[1] if ends else len(text)


@pytest.mark.parametrize("tokenizer", TOKENIZERS, ids=["bytes", "bpe"])
@given(text=st.text("abcé漢🙂 ", max_size=30), stops=st.lists(st.text("abcé漢", min_size=1, max_size=4), max_size=3))
def test_the_text_ends_before_the_first_stop_string(tokenizer, text, stops):
    pieces, shown, stopped = written(tokenizer, tokenizer.encode(text), stops)
    wanted = text[: first_stop(text, stops)]
    assert "".join(pieces) == wanted
    assert stopped == any(stop in text for stop in stops)
    assert "\ufffd" not in "".join(pieces)
    sent = 0
    for piece in pieces[:-1]:  # what has been sent is never the beginning of a stop string that then completes
        sent += len(piece)
        assert sent <= len(wanted)
    inside = b"".join(tokenizer.token_bytes(token.entry.token) for token in shown)
    assert wanted.encode().startswith(inside)
    if not stopped:
        assert inside == text.encode()


@given(cut=st.integers(0, 8))
def test_an_incomplete_character_at_the_end_is_replaced(cut):
    (tokenizer, _), data = TOKENIZERS, "aé🙂".encode()[:cut]
    pieces, shown, _ = written(tokenizer, list(data))
    assert "".join(pieces) == tokenizer.decode(list(data))
    assert [token.entry.token for token in shown] == list(data)


def test_the_stop_string_that_ends_first_decides_also_where_a_token_holds_several():
    tokenizer = TOKENIZERS[1]
    assert len(tokenizer.encode("abcab")) == 1
    for tokens in (tokenizer.encode("abcab"), [*map(tokenizer.engine.token_to_id, "abcab")]):
        pieces, _, stopped = written(tokenizer, tokens, ["abcab", "bc"])
        assert ("".join(pieces), stopped) == ("a", True)


def test_nothing_is_held_back_without_need():
    tokenizer = TOKENIZERS[0]
    pieces, _, _ = written(tokenizer, tokenizer.encode("xab ababc"), ["abc"])
    assert pieces == ["x", "", "", "ab ", "", "", "ab", "", "", ""]


def test_the_bytes_of_tokens_add_up_to_the_text():
    for tokenizer in TOKENIZERS:
        text = "ab é漢🙂\n~"
        assert b"".join(map(tokenizer.token_bytes, tokenizer.encode(text))) == text.encode()
        assert tokenizer.token_bytes(tokenizer.end_of_text) == b"<|endoftext|>"
        assert tokenizer.token_bytes(10**6) == b""
