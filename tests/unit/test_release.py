"""`make release`: what it refuses, and what a release consists of, in a small repository with a stand-in of twine."""

import shutil
import subprocess
import sys
import tarfile
import zipfile
from datetime import date
from pathlib import Path

import pytest

from tests.support.pages import TOP
from tests.support.release import making

TODAY = date(2026, 1, 2)
FILES = {
    "pyproject.toml": """
        [build-system]
        requires = ["hatchling"]
        build-backend = "hatchling.build"

        [project]
        name = "small"
        version = "0.1.0"

        [tool.hatch.build.targets.wheel]
        packages = ["outbox"]

        [tool.hatch.build.targets.sdist]
        include = ["/outbox"]
        """,
    ".ci/contents.toml": """
        [wheel]
        outbox = "outbox"

        [sdist]
        ".gitignore" = ".gitignore"
        outbox = "outbox"
        "pyproject.toml" = "pyproject.toml"
        """,
    ".gitignore": "dist/\n",
    "outbox/__init__.py": "",
    "examples/deploy/Dockerfile": "RUN pip install 'outbox-log==0.1.0'\n",
    "examples/deploy/kubernetes.yaml": "name: outbox-upgrade-0-1-0  # a job\nimage: registry.example/outbox:0.1.0\n",
    "CHANGELOG.md": "# Changelog\n\n## Unreleased\n\n- New.\n\n## 0.1.0 (2025-01-01)\n\nThe first version.\n",
}


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A repository whose version 0.1.0 is released, with one change since."""
    top = tmp_path_factory.mktemp("repository")
    for name, text in FILES.items():
        (top / name).parent.mkdir(parents=True, exist_ok=True)
        (top / name).write_text("\n".join(line.removeprefix(" " * 8) for line in text.splitlines()) + "\n")
    for command in ("init --quiet", "add --all", "commit --quiet --message first", "tag v0.1.0"):
        git(top, *command.split())
    return top


@pytest.fixture
def top(template: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository of this test, and a twine that finds nothing wrong."""
    stand_in = tmp_path / "programs"
    stand_in.mkdir()
    (stand_in / "twine.py").write_text("")
    monkeypatch.setenv("PYTHONPATH", str(stand_in))
    for name in ("AUTHOR", "COMMITTER"):
        monkeypatch.setenv(f"GIT_{name}_NAME", "tests")
        monkeypatch.setenv(f"GIT_{name}_EMAIL", "tests@example.org")
    return Path(shutil.copytree(template, tmp_path / "repository"))


def git(top: Path, *arguments: str) -> str:
    who = ["-c", "user.name=tests", "-c", "user.email=tests@example.org"]
    return subprocess.run(["git", *who, *arguments], cwd=top, check=True, capture_output=True, text=True).stdout


def change(top: Path, name: str, old: str, new: str) -> None:
    """Commit a change."""
    text = (top / name).read_text()
    assert old in text
    (top / name).write_text(text.replace(old, new))
    git(top, "commit", "--quiet", "--all", "--message", "changed")


def state(top: Path) -> tuple[str, str, str]:
    """What a release would change."""
    return git(top, "rev-parse", "HEAD"), git(top, "tag"), git(top, "status", "--porcelain")


def test_a_release_is_one_commit_with_its_tag_and_two_archives(top):
    archives = making.release(top, "0.2.0", TODAY)

    assert [str(each.relative_to(top)) for each in archives] == [
        "dist/small-0.2.0.tar.gz",
        "dist/small-0.2.0-py2.py3-none-any.whl",
    ]
    assert git(top, "log", "--format=%s", "v0.2.0").splitlines() == ["Version 0.2.0", "first"]
    assert git(top, "diff", "--name-only", "v0.1.0", "v0.2.0").split() == [
        "CHANGELOG.md",
        "examples/deploy/Dockerfile",
        "examples/deploy/kubernetes.yaml",
        "pyproject.toml",
    ]
    assert (top / "CHANGELOG.md").read_text().splitlines()[2:7] == [
        "## Unreleased",
        "",
        "## 0.2.0 (2026-01-02)",
        "",
        "- New.",
    ]
    assert (top / "examples/deploy/kubernetes.yaml").read_text().splitlines() == [
        "name: outbox-upgrade-0-2-0  # a job",
        "image: registry.example/outbox:0.2.0",
    ]
    assert (making.version_of(top), state(top)[2]) == ("0.2.0", "")


@pytest.mark.parametrize("version", ["0.1.0", "0.0.9", "0.1.0rc1"])
def test_a_version_has_to_be_greater(top, version):
    with pytest.raises(making.Refused, match=f"^{version} is not greater than 0.1.0$"):
        making.release(top, version, TODAY)


def test_a_version_has_to_be_greater_than_each_tag(top):
    """A branch may tell an earlier version."""
    git(top, "tag", "v0.3.0")

    with pytest.raises(making.Refused, match=r"^0.2.0 is not greater than 0.3.0$"):
        making.release(top, "0.2.0", TODAY)


@pytest.mark.parametrize("version", ["", "v0.2.0", "0.2", "latest"])
def test_a_version_has_three_numbers(top, version):
    with pytest.raises(making.Refused, match=f"^{version} is no version such as 0.2.0 or 0.2.0rc1$"):
        making.release(top, version, TODAY)


@pytest.mark.parametrize("name", ["outbox/__init__.py", "outbox/forgotten.py"])
def test_a_tree_with_changes_is_refused(top, name):
    (top / name).write_text("changed = True\n")

    with pytest.raises(making.Refused, match=f"^commit these first:\n.* {name}$"):
        making.release(top, "0.2.0", TODAY)


def test_a_changelog_with_nothing_to_tell_is_refused(top):
    change(top, "CHANGELOG.md", "- New.\n", "")

    with pytest.raises(making.Refused, match=r"^CHANGELOG\.md has nothing under ## Unreleased$"):
        making.release(top, "0.2.0", TODAY)


def test_a_file_that_tells_another_version_is_refused_and_nothing_is_changed(top):
    change(top, "examples/deploy/Dockerfile", "0.1.0", "0.0.1")
    before = state(top)

    with pytest.raises(
        making.Refused, match=r"^examples/deploy/Dockerfile does not tell version 0.1.0 as \"==0.1.0'\"$"
    ):
        making.release(top, "0.2.0", TODAY)

    assert state(top) == before


@pytest.mark.parametrize(
    ("names", "differences"),
    [
        (["outbox/__init__.py", "small-0.2.0.dist-info/METADATA"], []),
        (["outbox/__init__.py", "tests/big.bin", "outbox/old.py"], ["+ outbox/old.py", "+ tests/big.bin"]),
        ([], ["- outbox/__init__.py"]),
    ],
)
def test_a_wheel_holds_what_the_list_says(top, names, differences):
    with zipfile.ZipFile(top / "small.whl", "w") as wheel:
        for name in names:
            wheel.writestr(name, "")

    assert list(making.differences_of(top, top / "small.whl")) == differences


def test_a_source_archive_holds_what_the_list_says(top):
    with tarfile.open(top / "small.tar.gz", "w:gz") as archive:
        for name in ("outbox/__init__.py", "pyproject.toml", "PKG-INFO", "secret.env"):
            archive.add(top / "pyproject.toml", f"small-0.2.0/{name}")

    assert list(making.differences_of(top, top / "small.tar.gz")) == ["+ secret.env", "- .gitignore"]


def test_archives_with_other_contents_are_refused(top):
    with zipfile.ZipFile(top / "small.whl", "w"):
        pass

    with pytest.raises(
        making.Refused, match=r"^small\.whl is not what \.ci/contents\.toml lists:\n- outbox/__init__\.py$"
    ):
        making.check(top, [top / "small.whl"])


def test_what_twine_finds_wrong_is_refused_and_nothing_is_changed(top, tmp_path):
    (tmp_path / "programs" / "twine.py").write_text(
        "import sys\nsys.exit('a bad title' if 'check' in sys.argv else 0)\n"
    )
    before = state(top)

    with pytest.raises(making.Refused, match=r"^twine check:\na bad title\n$"):
        making.release(top, "0.2.0", TODAY)

    assert state(top) == before


def test_a_release_without_twine_does_not_begin(top, tmp_path):
    (tmp_path / "programs" / "twine.py").write_text("import sys\nsys.exit(1)\n")

    with pytest.raises(making.Refused, match=r"^twine is missing; run: pip install -e '\.\[dev\]'$"):
        making.release(top, "0.2.0", TODAY)


def test_a_wrong_command_is_told_in_one_line(top):
    program = [sys.executable, str(TOP / ".ci" / "release.py")]

    ended = subprocess.run(program, cwd=top, capture_output=True, text=True, check=False)

    assert (ended.returncode, ended.stderr) == (1, "usage: python .ci/release.py VERSION, or --check FILE…\n")
