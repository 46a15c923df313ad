"""What is published: a wheel with the package alone, and a long description whose links lead somewhere."""

import os
import re
import subprocess
import sys
import tomllib
import zipfile
from email import message_from_bytes
from email.message import Message
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.support.pages import TOP
from tests.support.release import making

PROJECT = tomllib.loads((TOP / "pyproject.toml").read_text())["project"]
SITE = PROJECT["urls"]["Documentation"]
MOST_BYTES = 1_200_000


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built from this folder."""
    if find_spec("hatch_fancy_pypi_readme") is None and not os.environ.get("CI"):
        pytest.skip("the wheel is built with hatch-fancy-pypi-readme, of the extra dev")
    folder = tmp_path_factory.mktemp("dist")
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    subprocess.run(build, cwd=TOP, check=True, capture_output=True, timeout=120)
    (found,) = folder.iterdir()
    return found


@pytest.fixture(scope="module")
def metadata(wheel: Path) -> Message:
    with zipfile.ZipFile(wheel) as files:
        (name,) = [name for name in files.namelist() if name.endswith(".dist-info/METADATA")]
        return message_from_bytes(files.read(name))


def test_the_wheel_holds_what_the_list_says(wheel):
    if not (TOP / ".git").exists():
        pytest.skip("the list is compared with the files that git knows")

    assert list(making.differences_of(TOP, wheel)) == []
    assert wheel.stat().st_size < MOST_BYTES


def test_every_link_of_the_long_description_is_absolute(metadata):
    links = re.findall(r"\]\(([^)]+)\)", metadata.get_payload())

    assert len(links) > 10
    assert [link for link in links if not link.startswith(("https://", "#"))] == []


def test_the_long_description_leads_to_pages_of_the_site(metadata):
    pages = set(re.findall(rf"\]\({re.escape(SITE)}([\w-]+)\.html", metadata.get_payload()))

    assert len(pages) > 5
    assert {page for page in pages if not (TOP / "docs" / f"{page}.md").is_file()} == set()


def test_what_is_promised_is_what_the_matrix_tests(metadata):
    named = {each for each in metadata.get_all("Classifier", []) if re.search(r":: 3\.\d+$", each)}
    script = (TOP / ".ci" / "matrix").read_text()
    pythons = sorted({int(minor) for minor in re.findall(r"in_row 3\.(\d+) ", script)})
    servers = sorted({int(major) for major in re.findall(r"\[(\d+)\]=", script)})

    promise = f"PostgreSQL {servers[0]} to {servers[-1]}, or SQLite; Python 3.{pythons[0]} to 3.{pythons[-1]}"
    assert [promise in (TOP / page).read_text().replace("\n", " ") for page in ("README.md", "docs/index.md")] == [
        True
    ] * 2
    assert PROJECT["requires-python"] == f">=3.{pythons[0]}"
    assert named == {f"Programming Language :: Python :: 3.{minor}" for minor in pythons}


def test_a_release_finds_the_version_wherever_it_is_told(tmp_path):
    for name in making.TOLD:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text((TOP / name).read_text())

    making.set_version(tmp_path, "12.34.56")

    told = sum((tmp_path / name).read_text().count("12.34.56") for name in making.TOLD)
    assert (told, (tmp_path / "examples/deploy/kubernetes.yaml").read_text().count("12-34-56")) == (4, 1)
