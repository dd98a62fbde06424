"""Settings of generation: what is out of range is refused in one line that names the value."""

import pytest

from shoestring.core.errors import ConfigError
from shoestring.decode.settings.generation import Sampling, Speculation


@pytest.mark.parametrize(
    ("settings", "values"),
    [
        (Sampling, {"temperature": -1.0}),
        (Sampling, {"temperature": float("inf")}),
        (Sampling, {"temperature": float("nan")}),
        (Sampling, {"top_k": -1}),
        (Sampling, {"top_p": 0.0}),
        (Sampling, {"top_p": 1.1}),
        (Sampling, {"min_p": -0.1}),
        (Sampling, {"min_p": 2.0}),
        (Sampling, {"repetition_penalty": 0.0}),
        (Sampling, {"seed": -1}),
        (Sampling, {"seed": 2**63}),
        (Speculation, {"draft_length": -1}),
        (Speculation, {"draft_length": 17}),
        (Speculation, {"max_draft_length": 0}),
        (Speculation, {"verification": "none"}),
    ],
)
def test_a_value_out_of_range_is_named(settings, values):
    ((name, value),) = values.items()
    with pytest.raises(ConfigError, match=f"^{name} is {value}"):
        settings(**values)


def test_what_takes_the_likeliest_token_is_greedy():
    assert Sampling(temperature=0).greedy
    assert Sampling(top_k=1).greedy
    assert not Sampling().greedy
