"""What others made is opened by one module."""

from pathlib import Path

import pytest

from tools import opens


@pytest.mark.parametrize(
    "statement",
    [
        "open(name)",
        "open(name, 'r+b')",
        "path.open('rb')",
        "path.open()",
        "Path(name).read_text('utf-8')",
        "path.with_name('b').read_bytes()",
        "import json; json.load(file)",
        "from json import loads as parse; parse(text)",
        "import numpy as np; np.memmap(path)",
        "from safetensors.torch import load_model as fill; fill(model, path)",
        "import tokenizers; tokenizers.Tokenizer.from_file(path)",
        "from gguf import GGUFReader as _; import gguf; gguf.GGUFReader(path)",
        "import os; os.open(path, flags)",
        "import shutil; shutil.copyfile(one, other)",
    ],
)
def test_a_module_that_opens_a_file_is_named(tmp_path: Path, capsys, statement):
    module = tmp_path / "src/shoestring/area/module.py"
    module.parent.mkdir(parents=True)
    module.write_text(f"'''Text.'''\n{statement}\n")
    assert opens.main([str(tmp_path)]) == 1
    assert "src/shoestring/area/module.py:2: " in capsys.readouterr().out
    module.write_text(f"'''Text.'''\n{statement}  # own file: it is written above\n")
    assert opens.main([str(tmp_path)]) == 0


@pytest.mark.parametrize(
    "statement", ["path.open('wb')", "open(name, 'x')", "ring.open()", "Part.open(path, 3)", "x(1)"]
)
def test_writing_and_other_objects_are_not(tmp_path: Path, statement):
    module = tmp_path / "src/shoestring/module.py"
    module.parent.mkdir(parents=True)
    module.write_text(statement)
    assert opens.main([str(tmp_path)]) == 0


def test_the_modules_that_look_first_may(tmp_path: Path):
    for name in opens.HOMES:
        module = tmp_path / "src/shoestring" / name
        module.parent.mkdir(parents=True, exist_ok=True)
        module.write_text("open(name)")
    assert opens.main([str(tmp_path)]) == 0


def test_an_exemption_that_is_not_needed_any_more_is_named(tmp_path: Path, capsys):
    module = tmp_path / "src/shoestring" / next(name for name in opens.OWN if name.endswith(".py"))
    module.parent.mkdir(parents=True)
    module.write_text("pass")
    assert opens.main([str(tmp_path)]) == 1
    assert "which opens nothing" in capsys.readouterr().out


@pytest.mark.slow
def test_this_package_keeps_it():
    assert list(opens.faults(Path(__file__).parents[2])) == []
