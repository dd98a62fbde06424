"""No class name of the package has two meanings."""

from pathlib import Path

import pytest

from tools import names


def test_a_class_name_is_defined_once(tmp_path: Path, capsys):
    for path, text in {"a": "class Plan: ...", "b": "class Other:\n    class Plan: ...", "c": "Plan = 1"}.items():
        (tmp_path / "src" / path).mkdir(parents=True)
        (tmp_path / "src" / path / "x.py").write_text(text)
    assert names.main([str(tmp_path)]) == 1
    assert capsys.readouterr().out == "src/b/x.py:2: class Plan is also at src/a/x.py:1; name each by what it is\n"
    (tmp_path / "src/b/x.py").unlink()
    assert names.main([str(tmp_path)]) == 0


@pytest.mark.slow
def test_this_package_keeps_it():
    assert list(names.faults(Path(__file__).parents[2])) == []
