"""Chat templates that never end, or take all memory: hand-made ones, and combinations of their parts.

And jobs of that kind for processes that can be ended, which import this module.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator

HAND_MADE = {
    "nested loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% for c in range(99999) %}"
    "{% endfor %}{% endfor %}{% endfor %}",
    "loops that write": "{% for a in range(99999) %}{% for b in range(99999) %}x{% endfor %}{% endfor %}",
    "recursion": "{% macro f(n) %}{{ f(n + 1) }}{% endmacro %}{{ f(0) }}",
    "two recursions": "{% macro f(n) %}{% if n < 60 %}{{ f(n + 1) }}{{ f(n + 1) }}{% endif %}{% endmacro %}{{ f(0) }}",
    "a recursive loop": "{% for m in [[[1]]] recursive %}{{ loop(m if m is iterable else [[1]]) }}{% endfor %}",
    "a huge string at once": "{{ 'a' * 10**10 }}",
    "a huge string of the messages": "{{ messages[0].content * 10**10 }}",
    "a huge number at once": "{{ 10**(10**10) }}",
    "a huge number where nothing gets to": "{% if false %}{{ 7**(10**9) }}{% endif %}",
    "a huge number of the messages": "{{ (messages | length + 7) ** (10**9) }}",
    "a string that doubles": "{% set ns = namespace(t=messages[0].role) %}{% for i in range(99) %}"
    "{% set ns.t = ns.t + ns.t %}{% endfor %}{{ ns.t }}",
    "a list that doubles": "{% set ns = namespace(t=[1]) %}{% for i in range(99) %}"
    "{% set ns.t = ns.t + ns.t %}{% endfor %}{{ ns.t }}",
    "center": "{{ messages[0].content | center(10**10) }}",
    "center at once": "{{ 'a' | center(10**10) }}",
    "indent": "{{ (messages[0].content + '\n') * 1000 | indent(10**9, true) }}",
    "batch": "{{ messages | batch(10**10, 'x') | list }}",
    "slice": "{{ messages | slice(10**10) | list }}",
    "join": "{{ range(99999) | join(messages[0].content * 99999) }}",
    "nested joins": "{{ ([(['x' * 9999] * 9999) | join] * 9999) | join }}",
    "replace": "{% set ns = namespace(t='ab') %}{% for i in range(60) %}"
    "{% set ns.t = ns.t | replace('a', 'aab') | replace('b', 'bba') %}{% endfor %}{{ ns.t }}",
    "format": "{{ '%10000000000d' | format(1) }}",
    "the method format": "{{ '{:10000000000}'.format(1) }}",
    "ljust": "{{ messages[0].content.ljust(10**10) }}",
    "lipsum": "{{ lipsum(n=10**8) }}",
    "tojson": "{{ messages | tojson(indent=10**10) }}",
    "truncate": "{{ ('a' * 10**10) | truncate(5) }}",
    "a product of products": "{% for a in range(99999) %}{{ range(99999) | map('string') | join }}{% endfor %}",
    "sorting": "{% for a in range(99999) %}{{ range(99999) | sort(reverse=true) | sum }}{% endfor %}",
    "a cycler": "{% set c = cycler(*range(9999)) %}{% for a in range(99999) %}{% for b in range(99999) %}"
    "{{ c.next() }}{% endfor %}{% endfor %}",
    "a cause that is long": "{{ raise_exception('x' * 10**8) }}",
    "a time": "{{ strftime_now('%10000000000d') }}",
    "parentheses": "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
    "blocks in blocks": "{% if 1 %}" * 500 + "{% endif %}" * 500,
    "lists in lists": "{{ " + "[" * 3000 + "]" * 3000 + " }}",
    "wordwrap": "{{ ('a ' * 10**8) | wordwrap(1) }}",
    "urlize": "{{ ('www.' * 10**7) | urlize }}",
    "another file": "{% include '/etc/passwd' %}",
}

_VALUES = ("messages[0].content", "'ab'", "range(99999) | list", "messages", "99999", "'a' * 99999")
_GROWS = (
    "({0} * (10**9))",
    "(({0} | string) * 99999)",
    "(({0} | string) | center(10**9))",
    "(([{0}] * 99999) | join('x' * 9999))",
    "(({0} | string) | replace('', 'y' * 99999))",
    "([{0}] | batch(10**9, {0}) | list)",
    "(({0} | string | length) ** (10**8))",
    "(range(99999) | map('string') | join({0} | string))",
    "(({0} | string).rjust(10**9))",
    "(('%' ~ 10**9 ~ 's') | format({0} | string))",
)
_AROUND = (
    "{{{{ {0} }}}}",
    "{{% for a in range(99999) %}}{{{{ {0} }}}}{{% endfor %}}",
    "{{% set x = {0} %}}{{% for a in range(99999) %}}{{% for b in range(99999) %}}{{{{ x }}}}{{% endfor %}}"
    "{{% endfor %}}",
    "{{% macro f(x) %}}{{{{ f({0}) }}}}{{{{ f(x) }}}}{{% endmacro %}}{{{{ f({0}) }}}}",
    "{{% set ns = namespace(x={0}) %}}{{% for a in range(99) %}}{{% set ns.x = [ns.x, ns.x] %}}{{% endfor %}}"
    "{{{{ ns.x }}}}",
    "{{% if {0} %}}{{{{ {0} | string | length }}}}{{% endif %}}{{% for a in range(99999) %}}{{{{ {0} | string }}}}"
    "{{% endfor %}}",
)


def generated(count: int, seed: int = 0) -> Iterator[str]:
    """Templates of one to three parts that grow, in something that repeats them."""
    draw = random.Random(seed)
    for _ in range(count):
        grown = draw.choice(_VALUES)
        for _ in range(draw.randint(1, 3)):
            grown = draw.choice(_GROWS).format(grown)
        yield draw.choice(_AROUND).format(grown)


def endless(setup: bytes) -> Callable[[bytes], bytes]:
    """A handler that answers no job but harmless ones."""

    def handle(job: bytes) -> bytes:
        if job == b"exit":
            os._exit(3)
        if job == b"bug":
            raise ValueError("planted")
        while job == b"hang":
            pass
        return setup + job

    return handle
