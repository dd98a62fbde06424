"""Errors that travel between ranks and read as one line."""

import pytest

from shoestring.core import errors

KINDS = [each for each in vars(errors).values() if isinstance(each, type) and issubclass(each, errors.ShoestringError)]


@pytest.mark.parametrize("kind", KINDS)
def test_an_error_arrives_as_itself(kind):
    error = kind("what", hint="do")
    again = errors.ShoestringError.from_parts(error.parts(), "rank 1: ")
    assert type(again) is kind
    assert str(again) == "rank 1: what (hint: do)" and again.hint == "do"
    assert str(kind("what")) == "what"


@pytest.mark.parametrize("kind", KINDS)
def test_every_error_is_in_the_tree_that_the_module_draws(kind):
    assert kind.__name__ in errors.__doc__


def test_an_unknown_kind_arrives_as_the_base():
    assert type(errors.ShoestringError.from_parts(["Gone", "what", ""])) is errors.ShoestringError


def test_the_nearest_name_or_all():
    assert errors.nearest("stepz", ["steps", "batch"]) == "did you mean `steps`?"
    assert errors.nearest("q", ["steps", "batch"]) == "valid: batch, steps"
