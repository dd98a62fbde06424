"""Text of tokens that arrive one by one is what the whole of them decodes to, for every kind of tokenizer."""

import random

import pytest
import tokenizers

from shoestring.data.chat_template import chat_template
from shoestring.data.tokenizer import Tokenizer
from tests.decode.small_server import CHATML
from tests.rigs import foreign_tokenizers as foreign
from tests.rigs import text_checks as checks
from tests.shares import share

KINDS = [(kind, begins) for kind in foreign.KINDS for begins in (False, True)]
every_kind = pytest.mark.parametrize(("kind", "begins"), KINDS)


def decoder(kind, begins):
    """Decoding by `tokenizers` itself."""
    engine = tokenizers.Tokenizer.from_str(foreign.engine_of(kind, begins))
    return lambda ids, skip: engine.decode(list(ids), skip_special_tokens=skip)


def transformers_decoder(kind, begins, folder):
    transformers = pytest.importorskip("transformers")
    foreign.tokenizer_of(kind, begins).save(folder / "tokenizer.json")
    loaded = transformers.AutoTokenizer.from_pretrained(folder)
    return loaded, lambda ids, skip: loaded.decode(list(ids), skip_special_tokens=skip)


def check_tokens(kind, begins, decode, rounds):
    tokenizer = foreign.tokenizer_of(kind, begins)
    for number in range(rounds):
        chance = random.Random(number)
        prompt, tokens = (foreign.random_tokens(chance, tokenizer, most) for most in (6, 12))
        skip = chance.random() < 0.5
        wanted = checks.text_behind(tokenizer, decode, prompt, tokens, skip)
        assert checks.streamed(tokenizer, prompt, tokens, skip) == wanted, (number, prompt, tokens)
        pieces, shown = checks.written(tokenizer, prompt, tokens, skip)
        assert "".join(pieces) == wanted, (number, prompt, tokens)
        assert [token.entry.token for token in shown] == tokens
        stops = checks.random_stops(chance, wanted)
        pieces, _ = checks.written(tokenizer, prompt, tokens, skip, stops)
        assert "".join(pieces) == checks.cut_at_stop(wanted, stops), (number, prompt, tokens, stops)


def check_texts(kind, begins, encode, decode, rounds):
    tokenizer = foreign.tokenizer_of(kind, begins)
    for number in range(rounds):
        chance = random.Random(number)
        text = foreign.random_text(chance)
        ids = encode(text)
        if ids:
            assert tokenizer.encode_prompt(text) == ids, (number, text)
        cut = chance.randint(0, len(ids))
        wanted = checks.text_behind(tokenizer, decode, ids[:cut], ids[cut:], True)
        assert checks.streamed(tokenizer, ids[:cut], ids[cut:], True) == wanted, (number, text, cut)


@every_kind
def test_streamed_tokens_read_as_all_tokens_do(kind, begins):
    check_tokens(kind, begins, decoder(kind, begins), 150)


@every_kind
def test_prompts_are_encoded_and_continued_as_by_the_tokenizer_itself(kind, begins):
    engine = tokenizers.Tokenizer.from_str(foreign.engine_of(kind, begins))
    check_texts(kind, begins, lambda text: engine.encode(text).ids, decoder(kind, begins), 150)


@pytest.mark.slow
@every_kind
def test_texts_are_those_of_transformers(kind, begins, tmp_path):
    loaded, decode = transformers_decoder(kind, begins, tmp_path)
    check_tokens(kind, begins, decode, share(3000, 1000))
    check_texts(kind, begins, lambda text: loaded(text)["input_ids"], decode, share(3000, 1000))


@pytest.mark.parametrize(
    "kind", [kind for kind in foreign.KINDS if kind != "BPE, suffixes"]
)  # a space there comes with the next token
def test_tokens_stand_where_their_offsets_say(kind):
    tokenizer = foreign.tokenizer_of(kind)
    text = "the cat 漢字🙂 sat<think> on é mat</think> isn't"
    ids = tokenizer.encode(text)
    for cut in range(len(ids)):
        pieces, shown = checks.written(tokenizer, ids[:cut], ids[cut:], True)
        assert not checks.misplaced(tokenizer, "".join(pieces), shown)


@every_kind
def test_no_text_is_a_special_token_unless_it_is_asked_for(kind, begins):
    tokenizer = foreign.tokenizer_of(kind, begins, CHATML)
    unknown = tokenizer.engine.token_to_id("<unk>")
    template = chat_template(tokenizer)
    spelled = "a<|im_end|> </s> the<s> <|im_start|>"
    by_template = template.encode([{"role": "user", "content": "the"}])
    for ids in (tokenizer.encode(spelled), tokenizer.encode_prompt(spelled, parse_special=False)[begins:]):
        assert tokenizer.special.isdisjoint(set(ids) - {unknown})
    ids = template.encode([{"role": "user", "content": spelled}])
    special = tokenizer.special - {unknown}
    assert [token for token in ids if token in special] == [token for token in by_template if token in special]


def test_a_space_after_the_prompt_belongs_to_the_text_and_can_stop_it():
    tokenizer = foreign.tokenizer_of("byte-fallback, space before")
    whole = tokenizer.encode("the cat sat on")
    prompt, tokens = whole[:2], whole[2:]
    assert tokenizer.decode(prompt) == "the cat"
    assert checks.streamed(tokenizer, prompt, tokens, True) == " sat on"
    pieces, _ = checks.written(tokenizer, prompt, tokens, True, [" sat"])
    assert "".join(pieces) == ""


def test_bytes_that_are_no_text_become_replacement_characters():
    tokenizer = foreign.tokenizer_of("byte-fallback, space before")
    parts = [tokenizer.engine.token_to_id(f"<0x{byte:02X}>") for byte in "漢".encode()]
    stream = tokenizer.stream(tokenizer.encode("a"))
    assert [*map(stream.add, parts)] == ["", "", ""]  # one more byte could make all of them replacement characters
    assert stream.add(parts[1]) == "\ufffd" * 4
    assert stream.add(parts[1]) == "\ufffd"
    assert stream.add(tokenizer.encode("the")[0]) == " the"


def test_special_tokens_are_hidden_by_default_and_other_added_tokens_are_not():
    tokenizer = foreign.tokenizer_of("byte-level")
    ids = tokenizer.encode_prompt("<think>a</think><|im_end|>b")
    assert tokenizer.decode(ids) == "<think>a</think>b"
    assert checks.streamed(tokenizer, [], ids, False) == "<think>a</think><|im_end|>b"
    assert tokenizer.decode(tokenizer.encode("<|im_end|>")) == "<|im_end|>"
    pieces, _ = checks.written(tokenizer, [], ids, False, ["<|im_end|>"])
    assert "".join(pieces) == "<think>a</think>"


def test_special_tokens_that_only_the_configuration_names_are_special():
    engine = tokenizers.Tokenizer.from_str(foreign.engine_of("byte-level"))
    config = b'{"eos_token": "</s>", "pad_token": {"content": "<think>"}, "extra_special_tokens": ["</think>", 3]}'
    tokenizer = Tokenizer(engine, companions={"tokenizer_config.json": config})
    ids = tokenizer.encode_prompt("a<think>b</think>")
    assert tokenizer.decode(ids) == "ab"
    assert len(ids) == 4


def test_a_long_stream_costs_no_more_for_each_token(monkeypatch):
    tokenizer = foreign.tokenizer_of("byte-fallback, space before")
    lengths = []
    decode = Tokenizer.decode
    monkeypatch.setattr(
        Tokenizer,
        "decode",
        lambda self, ids, *rest, **more: lengths.append(len(ids)) or decode(self, ids, *rest, **more),
    )
    chance = random.Random(0)
    stream = tokenizer.stream([5] * 1000)
    tokens = [token for _ in range(500) for token in foreign.random_tokens(chance, tokenizer)]
    for token in tokens:
        stream.add(token)
    assert sum(lengths) < 12 * len(tokens)
