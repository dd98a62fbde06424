"""The tasks of the guide "A task of your own", as they stand there."""

import json
import re
import sys
from pathlib import Path

import pytest
import torch

from shoestring.cli import main
from shoestring.models.loading import load_model

GUIDE = (Path(__file__).parents[2] / "docs/guides/your-own-task.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", GUIDE, re.DOTALL | re.MULTILINE)


@pytest.fixture
def project(tmp_path, monkeypatch):
    """A folder with the files of the guide, which is the current one."""
    for module, code in zip(("task", "gan"), blocks("python"), strict=False):
        (tmp_path / f"{module}.py").write_text(code)
    for name, text in zip(("task", "gan"), blocks("toml"), strict=False):
        (tmp_path / f"{name}.toml").write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    yield tmp_path
    for module in ("task", "gan"):
        sys.modules.pop(module, None)


def last(folder: Path, key: str) -> float:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [row[key] for row in lines if key in row][-1]


@pytest.mark.slow
def test_the_pairs_are_found(project):
    assert main(["train", "task.toml", "--folder", "run"]) == 0
    assert last(project / "run", "recall") > 0.8 and (project / "run/best/model.safetensors").is_file()
    assert main(["check", "task.toml"]) == 0


@pytest.mark.slow
def test_both_networks_learn_with_settings_of_their_own(project):
    """The discriminator alone stays apart: without the detached parameters it would train for the generator."""
    assert main(["train", "gan.toml", "--folder", "run"]) == 0
    model, _ = load_model(project / "run")
    with torch.no_grad():
        radius = model.generator(torch.randn(256, 8, generator=torch.Generator().manual_seed(0))).norm(dim=1)
    assert float((radius - 1).abs().mean()) < 0.25
    gan = sys.modules["gan"]
    network = gan.Gan()
    _, _, fooled = network(torch.randn(16, 2))
    fooled.sum().backward()
    assert all(parameter.grad is None for parameter in network.discriminator.parameters())
    assert all(parameter.grad is not None for parameter in network.generator.parameters())
