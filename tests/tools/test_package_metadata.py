"""What a package index shows: no link that leads nowhere, and classifiers that the index knows."""

import email
import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
from trove_classifiers import classifiers

from tools.package_metadata import for_index, urls

ROOT = Path(__file__).parents[2]
TEXT = "![a picture](docs/a.png)\n[a](docs/b.md#here) [b](https://example.org/x) [c](#section) `[d](e)`\n"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """The metadata of a wheel built from this checkout."""
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", folder, ROOT]
    subprocess.run(command, check=True, capture_output=True, timeout=120)
    with zipfile.ZipFile(next(folder.glob("*.whl"))) as file:
        (name,) = (each for each in file.namelist() if each.endswith(".dist-info/METADATA"))
        return email.message_from_bytes(file.read(name))


@pytest.mark.slow
def test_the_readme_of_a_package_has_no_link_that_leads_nowhere(wheel):
    targets = re.findall(r"\]\(([^)\s]+)\)", wheel.get_payload())
    assert all(target.startswith(("https://", "#")) for target in targets)
    assert wheel.get_payload().startswith("# shoestring") and "your own loop" in wheel.get_payload()


def test_links_become_absolute_once_the_repository_is_known_and_text_until_then():
    assert for_index(TEXT, "") == "\na [b](https://example.org/x) [c](#section) `d`\n"
    there = for_index(TEXT, "https://example.org/r")
    assert "![a picture](https://example.org/r/raw/main/docs/a.png)" in there
    assert "[a](https://example.org/r/blob/main/docs/b.md#here) [b](https://example.org/x) [c](#section)" in there
    assert urls("") == {} and urls("https://example.org/r")["Issues"] == "https://example.org/r/issues"


def test_every_link_of_the_readme_leads_to_a_file():
    targets = re.findall(r"\]\((?!https:|#)([^)\s#]+)", (ROOT / "README.md").read_text())
    assert targets and not [target for target in targets if not (ROOT / target).exists()]


@pytest.mark.slow
def test_the_classifiers_are_known_and_name_the_versions_that_are_supported(wheel):
    listed = wheel.get_all("Classifier")
    assert listed and set(listed) <= classifiers
    lowest = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["requires-python"].removeprefix(">=")
    assert f"Programming Language :: Python :: {lowest}" in listed
