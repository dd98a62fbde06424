"""The walker: what it follows of a parameter, and what it counts as a return."""

from pathlib import Path

import pytest

from tools.walks import WALKS, Package, shown, walk

FILES = {
    "start": """
from functools import partial
from package import other
from package.kinds import Holder, Settings
from package.other import bound, changed, deep, ignored

def start(settings: Settings, world: World, size: int) -> None:
    settings = changed(settings).placed(size)
    world.agree(lambda: other.inside(settings))
    later = partial(bound, 1, settings)
    ignored(size)
    holder = Holder(size, settings)
    holder.without()
    holder.use()
    near(settings)
    print(settings)
    unknown(settings)

def near(settings):
    deep(settings=settings)
""",
    "other": """
from package.kinds import Settings
def changed(settings: Settings) -> Settings: ...
def inside(it): ...
def bound(one, it): ...
def deep(*, settings):
    deep(settings=settings)
def ignored(size): ...
""",
    "kinds": """
@dataclass
class Settings:
    def placed(self, size) -> Self: return replace(self, size=size)

@dataclass
class Holder:
    size: int
    held: Settings
    def without(self): return self.size
    def use(self): self._inner()
    def _inner(self): return self.held
""",
}


@pytest.fixture
def package(tmp_path: Path) -> Package:
    (tmp_path / "src/package").mkdir(parents=True)
    for name, text in FILES.items():
        (tmp_path / f"src/package/{name}.py").write_text(text)
    (tmp_path / "src/package/__init__.py").touch()
    return Package(tmp_path)


def test_a_walk_follows_the_parameter_under_each_of_its_names(package):
    steps = walk(package, "package.start", "start", "settings")
    entered = [step.place.name for step in steps.steps if not step.back]
    assert entered == ["start", "changed", "Settings.placed", "inside", "bound", "near", "deep"]
    assert [line.rpartition(": ")[2] for line in steps.unresolved] == ["unknown"]


def test_a_return_is_a_step_into_a_file_that_was_left(package):
    steps = walk(package, "package.start", "start", "settings")
    returns = [(step.place.name, step.back) for step in steps.steps if step.returns]
    assert returns == [
        ("start", True),  # from changed
        ("start", True),  # from placed
        ("inside", False),  # in the file of changed
        ("start", True),
        ("bound", False),
        ("start", True),
        ("deep", False),
        ("near", True),
    ]
    assert (steps.rooms, steps.returns) == (7, 8)
    assert sum(line.endswith("(return)") for line in shown(steps)) == 8


def test_an_object_that_holds_it_is_entered_where_its_method_uses_it(package):
    steps = walk(package, "package.start", "start", "size")
    entered = [step.place.name for step in steps.steps if not step.back]
    assert entered == ["start", "Settings.placed", "ignored", "Holder.without"]


def test_a_function_is_walked_as_often_as_it_is_called_or_once(tmp_path):
    (tmp_path / "src").mkdir()
    (tmp_path / "src/a.py").write_text("from b import f\ndef start(x):\n  f(x)\n  f(x)\n")
    (tmp_path / "src/b.py").write_text("def f(x): ...\n")
    counts = {once: walk(Package(tmp_path), "a", "start", "x", once=once) for once in (False, True)}
    assert [(steps.rooms, steps.returns) for steps in counts.values()] == [(2, 3), (2, 1)]


def test_a_function_that_has_moved_is_named(package):
    with pytest.raises(LookupError, match=r"no package\.start\.start with a parameter `other`"):
        walk(package, "package.start", "start", "other")


def test_the_walks_of_this_package_begin_somewhere():
    package = Package(Path(__file__).parents[2])
    for start in WALKS.values():
        assert walk(package, *start).rooms > 2
