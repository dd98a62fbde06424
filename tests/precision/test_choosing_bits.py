"""Which groups of operators get fewer bits, by measured errors."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from shoestring.precision.choosing import GAIN, Effect, choose

NAMES = tuple("abcdefg")


def cost(effects, names):
    return sum(abs(effects[name].error) for name in names)


def spared(effects, names):
    return sum(effects[name].spared for name in names)


@given(
    effects=st.dictionaries(
        st.sampled_from(NAMES),
        st.builds(Effect, st.floats(-0.2, 1.0), st.floats(-4.0, 16.0), st.booleans()),
    ),
    narrow=st.sets(st.sampled_from(NAMES)),
    rest=st.floats(0.0, 1.0),
    bound=st.floats(0.0, 4.0),
)
@settings(max_examples=120)
def test_the_expected_error_is_within_the_bound(effects, narrow, rest, bound):
    now = narrow & effects.keys()
    error = rest + cost(effects, now)  # of groups that were not measured, and of those that were
    chosen = choose(effects, narrow, error, bound)
    assert chosen <= effects.keys()
    assert chosen == choose(dict(reversed(effects.items())), sorted(narrow), error, bound)
    if chosen == now:
        return
    assert rest + cost(effects, chosen) <= max(bound, rest) + 1e-9
    for name in chosen:  # nothing is narrowed that costs bytes, unless it makes products faster
        assert effects[name].product or effects[name].spared > 0
    if not any(effects[name].product for name in chosen) and any(effect.product for effect in effects.values()):
        assert not chosen
        return
    for name in effects.keys() - chosen:  # what was left out does not fit, or spares nothing
        worth = effects[name].product or effects[name].spared > 0
        assert not worth or rest + cost(effects, {*chosen, name}) > bound - 1e-9
    if error <= bound and not any(effects[name].product for name in chosen - now):
        total = sum(abs(effect.spared) for effect in effects.values())
        assert spared(effects, chosen) - spared(effects, now) >= GAIN * total - 1e-9


def test_products_come_first_and_then_what_costs_least_for_its_bytes():
    effects = {
        "product": Effect(3.0, 1.0, True),
        "cheap": Effect(0.5, 10.0),
        "dear": Effect(0.5, 1.0),
        "useless": Effect(0.0, -1.0),
        "free": Effect(0.0, 2.0),
    }
    assert choose(effects, (), 0.0, 4.0) == {"product", "cheap", "dear", "free"}
    assert choose(effects, (), 0.0, 3.6) == {"product", "cheap", "free"}
    assert choose(effects, {"product", "dear"}, 3.5, 0.4) == {*()}  # too large an error widens products, and all else
    alone = {name: effect for name, effect in effects.items() if not effect.product}
    assert choose(alone, {"dear"}, 0.5, 1.4) == {"cheap", "dear", "free"}
    assert choose({**alone, "cancels": Effect(-2.0, 9.0)}, (), 0.0, 1.4) == {"cheap", "dear", "free"}
    assert choose(effects, {"product"}, 13.0, 4.0) == {*()}  # what was not measured fills the room


def test_what_is_narrow_stays_if_the_error_is_within_the_bound():
    """Effects that cancel add up to more than the error; no group is widened for that."""
    effects = {"one": Effect(0.9, 4.0, True), "other": Effect(-0.3, 4.0, True), "more": Effect(0.1, 4.0)}
    assert choose(effects, {"one", "other"}, 0.6, 0.6) == {"one", "other"}
    assert choose(effects, {"one", "other"}, 0.6, 0.7) == {"one", "other", "more"}
    assert choose(effects, {"one", "other"}, 0.6, 0.2) == {"other"}


def test_a_small_gain_is_not_worth_a_compilation():
    effects = {"large": Effect(0.1, 1000.0), "small": Effect(0.1, 1.0)}
    assert choose(effects, {"large"}, 0.1, 1.0) == {"large"}
    assert choose(effects, {"large"}, 2.0, 1.0) == {*()}  # unless the error is too large
