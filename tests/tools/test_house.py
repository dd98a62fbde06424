"""The table of the house: its numbers, the places behind them, and the texts that lie beside it."""

import json
import tomllib

from tools import house


def test_the_table_shows_before_and_now_and_the_places(capsys, monkeypatch, tmp_path):
    (tmp_path / "src").mkdir()
    (tmp_path / "src/a.py").write_text("class Job:\n    model: int\n    loss: int\n")
    (tmp_path / "before.json").write_text('{"job": 64}')
    monkeypatch.setattr(house, "ROOT", tmp_path)
    monkeypatch.setattr(house, "BEFORE", tmp_path / "before.json")
    monkeypatch.setattr(house, "ROWS", [row for row in house.ROWS if row.key in {"job", "lines"}])
    assert house.main([]) == 0
    assert [line.split()[-4:] for line in capsys.readouterr().out.splitlines()[1:]] == [
        ["64", "2", "<=", "15"],
        ["imports", "3", "3000", "fewer"],
    ]
    assert house.main(["--list", "job"]) == 0
    assert capsys.readouterr().out == "loss\nmodel\n"
    assert house.main(["--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"job": 2, "lines": 3}


def test_what_is_kept_beside_it_is_of_this_package():
    assert json.loads(house.BEFORE.read_text()).keys() == {row.key for row in [*house.ROWS, house.WHEEL]}
    questions = tomllib.loads((house.ROOT / "tools/questions/places.toml").read_text())["question"]
    assert len(questions) == 15 and all(question.keys() == {"ask", "answer", "at_first"} for question in questions)
