"""Biases, penalties and constraints: what a token is drawn from, by the definitions and by enumeration under drafts."""

import json
from dataclasses import replace
from itertools import product
from types import SimpleNamespace

import pytest
import tokenizers
import torch
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.decode.enumeration import BLOCK, TOKEN, Worlds, total_variation
from shoestring.core.errors import ConfigError
from shoestring.decode import changed_logits
from shoestring.decode.changed_logits import changed
from shoestring.decode.constraint import ConstraintError, Grammars
from shoestring.decode.engine import Request
from shoestring.decode.request import Row
from shoestring.decode.settings.generation import AnswerFormat, LogitChanges

END, WORDS = 3, "abc"


@pytest.fixture(scope="module")
def grammars():
    """Of a tokenizer that has three letters and an end."""
    pytest.importorskip("llguidance")
    engine = tokenizers.Tokenizer(tokenizers.models.BPE({"a": 0, "b": 1, "c": 2}, []))
    engine.add_special_tokens(["<e>"])
    engine.decoder = tokenizers.decoders.ByteLevel()
    return Grammars(engine.to_str(), 4, [END])


def row_of(text=(), prompt=(0,), constraint=None, **changes):
    asked = Request(tokens=list(prompt), max_new=99, changes=LogitChanges(**changes), constraint=constraint)
    return Row(asked, [*prompt, *text])


def defined(logits, generated, presence_penalty=0.0, frequency_penalty=0.0, bias=None):
    """Logits after a text, token by token from the definitions."""
    return [
        value
        + (bias or {}).get(token, 0.0)
        - presence_penalty * (token in generated)
        - frequency_penalty * generated.count(token)
        for token, value in enumerate(logits)
    ]


tokens = st.lists(st.integers(0, 6), max_size=6)
penalties = st.floats(-2, 2, allow_subnormal=False)


@given(
    prompt=tokens.filter(len),
    text=tokens,
    drafted=tokens,
    presence_penalty=penalties,
    frequency_penalty=penalties,
    bias=st.dictionaries(st.integers(0, 6), st.floats(-100, 100), max_size=7),
    seed=st.integers(0, 9),
)
def test_each_position_counts_what_was_generated_before_it(prompt, text, drafted, seed, **changes):
    """Token 6 has an embedding, but no logit; the prompt counts for nothing."""
    draw = torch.Generator().manual_seed(seed)
    logits = torch.randn(len(drafted) + 1, 6, generator=draw, dtype=torch.float64)
    before = logits.clone()
    found = changed(row_of(text, prompt, **changes), drafted, logits)
    wanted = [defined(own.tolist(), [*text, *drafted[:place]], **changes) for place, own in enumerate(logits)]
    torch.testing.assert_close(found, torch.tensor(wanted, dtype=torch.float64), rtol=1e-12, atol=1e-12)
    assert torch.equal(logits, before)


def test_a_ruled_out_token_stays_ruled_out_and_not_a_number_stays_seen():
    logits = torch.tensor([[-torch.inf, torch.nan, 0.0]])
    found = changed(row_of([0, 1], bias={0: 100.0, 2: -1.0}, presence_penalty=-2.0), [], logits)
    assert found[0, 0] == -torch.inf and found[0, 1].isnan() and found[0, 2] == -1.0


# -- by enumeration, under drafts --------------------------------------------------------------------------------------

EXPRESSION = "(ab|ca*|b)c?"
COMPLETE = {"ab", "b", "abc", "bc", *("c" + "a" * n + end for n in range(9) for end in ("", "c"))}
CASES = {
    "bias": {"bias": {0: 1.5, 2: -100.0}},
    "presence": {"presence_penalty": 2.0},
    "frequency": {"frequency_penalty": -1.25},
    "constraint": {},
    "all": {"bias": {0: -0.5, END: 1.0}, "presence_penalty": -1.0, "frequency_penalty": 2.0},
}


class ChangedWorlds(Worlds):
    """Distributions whose logits are changed, by the definitions."""

    def __init__(self, seed, length, text, constrained, changes):
        super().__init__(seed, V=4, length=length)
        self.logits = {context: chances.log() for context, chances in self.p.items()}
        self.text, self.constrained, self.changes = text, constrained, changes
        self.p = {context: self.defined(context) for context in self.p}

    def defined(self, context):
        logits = defined(self.logits[context].tolist(), [*self.text, *context], **self.changes)
        if self.constrained and END not in context:  # what follows the end is not kept
            written = "".join(WORDS[token] for token in (*self.text, *context) if token != END)
            for token, letter in enumerate(WORDS):
                if not any(each.startswith(written + letter) for each in COMPLETE):
                    logits[token] = -torch.inf
            if written not in COMPLETE:
                logits[END] = -torch.inf
        if max(logits) == -torch.inf:  # after what cannot be written, anything
            logits = [0.0] * 4
        return torch.tensor(logits, dtype=torch.float64).softmax(-1)


def under_drafts(rule, world, grammars, answer_format):
    """A rule that verifies what `changed` makes of the model's logits."""

    def p(draft):
        constraint = grammars.compile(answer_format).start() if world.constrained else None
        row = row_of(world.text, constraint=constraint, **world.changes)
        logits = torch.stack([world.logits[draft[:count]] for count in range(len(draft) + 1)])
        return changed(row, draft, logits).softmax(-1)

    return replace(
        rule,
        verify=lambda _, q, draft, coins: rule.verify(p(draft), q, draft, coins),
        chances=lambda _, q, draft: rule.chances(p(draft), q, draft),
    )


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("rule", [TOKEN, BLOCK], ids=lambda rule: rule.name)
def test_the_text_has_the_changed_distribution_whatever_drafts(rule, name, grammars):
    answer_format = AnswerFormat("regex", EXPRESSION)
    for seed, text in product(range(2), ([], [2], [2, 0])):
        world = ChangedWorlds(seed, 2, text, name in ("constraint", "all"), CASES[name])
        assert total_variation(under_drafts(rule, world, grammars, answer_format), world) <= 1e-12


def test_changes_that_do_not_see_drafts_show(grammars, monkeypatch):
    real = changed_logits.changed
    monkeypatch.setitem(globals(), "changed", lambda row, drafted, logits: torch.cat([
        real(row, [], own[None]) for own in logits
    ]))  # fmt: skip
    for name in ("presence", "frequency"):
        world = ChangedWorlds(0, 2, [2], False, CASES[name])
        assert total_variation(under_drafts(TOKEN, world, grammars, None), world) > 1e-3


# -- constraints -------------------------------------------------------------------------------------------------------


def test_a_constraint_follows_its_text_and_forgets_drafts(grammars):
    constraint = grammars.compile(AnswerFormat("regex", EXPRESSION)).start()
    alone = [
        grammars.compile(AnswerFormat("regex", EXPRESSION)).start().allowed(text, [], 5) for text in ([], [2], [2, 0])
    ]
    assert torch.equal(constraint.allowed([], [2, 0], 5), torch.cat(alone))
    assert torch.equal(constraint.allowed([], [1, 1], 5)[:1], alone[0])  # its second token is not of the expression
    assert constraint.allowed([], [1, 1], 5)[2].all()
    assert torch.equal(constraint.allowed([2], [0], 5), torch.cat(alone[1:]))
    assert not constraint.allowed([2, 0], [], 5)[:, 4].any()  # a token that the tokenizer does not have
    with pytest.raises(ConstraintError, match="does not follow"):
        constraint.allowed([2, 0, 1], [], 5)


def test_texts_of_one_format_do_not_share_their_state(grammars):
    first, second = (grammars.compile(AnswerFormat("choice", json.dumps(["ab", "ca"]))).start() for _ in range(2))
    assert first.allowed([0], [], 4).tolist() == [[False, True, False, False]]
    assert second.allowed([2], [], 4).tolist() == [[True, False, False, False]]
    assert first.allowed([0, 1], [END], 4).tolist() == [[False, False, False, True], [True] * 4]


@pytest.mark.parametrize(("kind", "source", "words"), [
    ("regex", "(a", "cannot be compiled"),
    ("regex", "(?=a)b", "cannot be compiled"),
    ("regex", "x", "no text has the format"),  # of a letter that no token has
    ("json_schema", '{"$ref": "#"}', "no text has the format"),
    ("json_schema", '{"type": "nothing"}', "cannot be compiled"),
    ("json_schema", '{"not": {}}', "Unimplemented keys"),
    ("json_schema", '{"allOf": [{"type": "string"}, {"type": "integer"}]}', "Unsatisfiable"),
    ("json_schema", "[]", "cannot be compiled"),
])  # fmt: skip
def test_a_format_that_is_wrong_or_fits_nothing_is_refused(kind, source, words, grammars):
    with pytest.raises(ConfigError, match=words):
        grammars.compile(AnswerFormat(kind, source))


def test_a_model_without_an_end_has_no_formats(grammars):
    with pytest.raises(ConfigError, match="no token that ends a text"):
        Grammars(SimpleNamespace(), 4, [])
