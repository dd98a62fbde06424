"""What is counted of the house, on small packages in which each is planted."""

from pathlib import Path

import pytest

from tools import counting
from tools.walks import Package


@pytest.fixture
def plant(tmp_path: Path):
    """A package of these files: path below ROOT -> text."""

    def planted(files: dict[str, str]) -> Package:
        for path, text in files.items():
            (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / path).write_text(text)
        return Package(tmp_path)

    return planted


def test_functions_that_are_complex_or_long(plant):
    branches = "".join(f"    if x == {number}: x = 1\n" for number in range(12))
    long = "    x = 1\n" * 60
    package = plant({"src/a.py": f"def f(x):\n{branches}\ndef g(x):\n    x = 1\n{long}\ndef h(x):\n{long}"})
    assert [line.split(": ")[0] for line in counting.complex_functions(package)] == ["src/a.py:1:5"]
    assert list(counting.long_functions(package)) == ["src/a.py:15: g: 61 lines"]


def test_lines_of_code(plant):
    imports = "import a\nfrom b import (\n    c,\n)\n"
    text = f'"""Text."""\n\n# Why.\n{imports}x = 1  # note\n\ndef f():\n    """Text."""\n    return x\n'
    assert counting.lines_of_code(plant({"src/a.py": text, "src/b.py": "x = 1\n"})) == 4


def test_private_functions_with_one_use(plant):
    package = plant(
        {
            "src/a.py": (
                "def _called(): ...\n"
                "def _passed(): ...\n"
                "@cache\ndef _decorated(): ...\n"
                "def _twice(): ...\n"
                "def _recursive(): _recursive()\n"
                "def _long():\n" + "    x = 1\n" * 4 + "def _elsewhere(): ...\n"
                "class A:\n"
                "    def _method(self): self._unused_here()\n"
                "    def __init__(self): self._method()\n"
                "_called(); f(_passed); _decorated(); _twice(); _twice(); _recursive(); _long()\n"
            ),
            "src/b.py": "from a import _elsewhere\n_elsewhere()\n",
            "src/c.py": "def _called(): ...\n",
        }
    )
    once = {function.name: (function.lines, function.inlinable) for function in counting.used_once(package)}
    assert once == {
        "_called": (1, True),
        "_passed": (1, False),
        "_decorated": (1, False),
        "_recursive": (1, True),
        "_long": (4, True),
        "_elsewhere": (1, True),
        "_method": (1, True),
    }
    assert len(list(counting.short(package, inlinable=True))) == 4
    assert len(list(counting.short(package, inlinable=False))) == 2


def test_public_members_and_what_lies_behind_them(plant):
    package = plant(
        {
            "src/a.py": (
                "class Inner:\n    x: int\n    y: int\n"
                "class Base:\n    def inherited(self): ...\n"
                "class Job(Base):\n"
                "    model: int\n    total: InitVar[int]\n    inner: Inner\n"
                "    def __init__(self):\n        self.a, self._b = 1, 2\n        self.made = Inner()\n"
                "    def step(self): ...\n    def _hidden(self): ...\n"
                "    @property\n    def seen(self) -> Inner: ...\n"
            )
        }
    )
    assert list(counting.members_of(package, "Job")) == [
        "a",
        "inherited",
        "inner: a Inner, which has 2",
        "made: a Inner, which has 2",
        "model",
        "seen: a Inner, which has 2",
        "step",
    ]
    assert [line.rpartition(" ")[2] for line in counting.public_names(package)] == [
        "Inner", "Base", "Base.inherited", "Job", "Job.step", "Job.seen",
    ]  # fmt: skip


def test_fields_typed_twice(plant):
    same = '    length: int = 3\n    """Length of the text."""\n'
    package = plant(
        {
            "src/shoestring/commands/verb.py": (
                "from shoestring.area.settings import Sampling\n"
                f'@dataclass\nclass Verb:\n{same}    heat: float = 1.0\n    """Temperature."""\n'
                "    def __call__(self):\n        Sampling(self.length, heat=self.heat, out=1)\n"
            ),
            "src/shoestring/area/settings.py": f"@dataclass\nclass Sampling:\n{same}    heat: float = 0.8\n",
            "src/shoestring/area/inner.py": '@dataclass\nclass A:\n    x: int\n    """Same."""\n    y = 1\n'
            '@dataclass\nclass B:\n    x: int\n    """Same."""\n    y = 1\n',
        }
    )
    verb = Path("src/shoestring/commands/verb.py")
    assert list(counting.typed_twice(package, {(verb, "Verb")})) == [
        f"{verb}:4: Verb.length, as in src/shoestring/area/settings.py:3: Sampling.length",
        f"{verb}:9: Verb.heat, given to Sampling",
    ]
    assert list(counting.typed_twice(package, set())) == []


def test_keys_with_several_meanings():
    texts = {
        "seed": {"a": "Seed of one.", "b": "Seed of another."},
        "keep": {"a": "How many.", "b": "Which."},
        "new": {"a": "One.", "c": "Other."},
        "same": {"a": "One.", "b": "One."},
    }
    reviewed = {
        "seed": {"seed": ["a", "b"]},
        "keep": {"number": ["a"], "names": ["b"], "old": ["z"]},
        "new": {"x": ["a"]},
    }
    assert list(counting.several_meanings(texts, reviewed)) == ["keep: names; number", "new: not reviewed in c"]


def test_settings_in_other_files(plant):
    package = plant(
        {
            "src/shoestring/good/settings/one.py": "class One: ...",
            "src/shoestring/good/hidden.py": "class Inner: ...",
            "src/shoestring/bad/__init__.py": "class Two: ...",
            "src/shoestring/bad/settings.py": "class Three: ...",
        }
    )
    names = {"good/settings/one.py": "One", "bad/__init__.py": "Two", "bad/settings.py": "Three"}
    settings = {(Path("src/shoestring") / path, name) for path, name in names.items()}
    assert list(counting.scattered(package, settings)) == ["bad: 1 in __init__.py, 1 in settings"]


def test_verbs_that_are_a_library(plant):
    package = plant(
        {
            "src/shoestring/__init__.py": "",
            "src/shoestring/verbs.py": "def run(): ...\ndef other(): ...\n",
            "src/shoestring/commands/verb.py": "def run(): ...\n",
            "src/shoestring/commands/__init__.py": "",
            "tests/test_a.py": "from shoestring import verbs\nverbs.run()\nother()\n",
        }
    )
    assert counting.not_importable(package, "verbs:run") == ""
    assert "no test calls" in counting.not_importable(package, "verbs:other")
    assert "part of the command line" in counting.not_importable(package, "commands.verb:run")
    assert "there is no" in counting.not_importable(package, "verbs:gone")
