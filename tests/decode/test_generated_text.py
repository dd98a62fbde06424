"""`generate` writes what decoding prompt and tokens gives behind the prompt, for every kind of tokenizer."""

import pytest

from shoestring.decode.engine import generate as draw
from shoestring.decode.settings.generation import Generation, Sampling, SeededOptions
from shoestring.models.saving import save_model
from shoestring.verbs.generate import generate
from tests.decode.small_server import model
from tests.rigs import foreign_tokenizers as foreign
from tests.rigs import text_checks as checks


@pytest.mark.parametrize("kind", ["byte-fallback, space before", "Unigram", "WordPiece"])
def test_generated_text_follows_its_prompt(kind, tmp_path):
    tokenizer = foreign.tokenizer_of(kind, begins=True)
    built = model(vocabulary=tokenizer.vocab_size)
    save_model(built, tokenizer, tmp_path, {"model": "-", "arguments": {}, "offered": {"context": 256}})

    def decode(ids, skip):
        return tokenizer.engine.decode(list(ids), skip_special_tokens=skip)

    prompt, rule = "the cat<|im_end|>", {"temperature": 1.0, "top_p": 1.0, "seed": 1}
    starts = []
    for parse, skip in ((True, True), (True, False), (False, True)):
        start = tokenizer.encode_prompt(prompt, parse_special=parse)
        starts.append(start)
        tokens = list(draw(built, start, max_new=40, sampling=Sampling(**rule), stop=[tokenizer.end_of_text]))
        settings = Generation(
            max_tokens=40, sampling=SeededOptions(**rule), parse_special=parse, skip_special_tokens=skip
        )
        wanted = checks.text_behind(tokenizer, decode, start, tokens, skip)
        assert "".join(generate(tmp_path, prompt, settings)) == wanted
    assert starts[0] == starts[1] != starts[2]
