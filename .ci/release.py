"""Makes a release: dates the changelog, sets the version, builds and checks both archives, commits and tags.

python .ci/release.py 0.2.0               a release, whose archives are in dist/
python .ci/release.py --check FILE…       only the checks of archives that are there

Nothing is uploaded. After a refusal all files are as before.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import tomllib
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, date, datetime
from pathlib import Path

from packaging.version import InvalidVersion, Version

TOP = Path(__file__).parents[1]
CHANGELOG, PROJECT = "CHANGELOG.md", "pyproject.toml"
#: Where the version is told: first the place that counts, then what is copied by users; `dashed`: as a name has it.
TOLD = {
    PROJECT: ('\nversion = "{version}"\n',),
    "examples/deploy/Dockerfile": ("=={version}'",),
    "examples/deploy/kubernetes.yaml": ("/outbox:{version}\n", "outbox-upgrade-{dashed} "),
}
#: What the format of an archive asks for.
OF_THE_FORMAT = re.compile(r"PKG-INFO|[^/]+\.dist-info/.+")
_UNRELEASED = "## Unreleased\n"


class Refused(Exception):  # noqa: N818 - the word of `make release`
    """The release cannot be made; the text says why."""


def release(top: Path, version: str, today: date) -> list[Path]:
    """Make the release of a repository; return its archives, the source first."""
    require_clean(top)
    require_greater(top, version)
    require_notes(top)
    require_twine()
    with unchanged_if_refused(top), tempfile.TemporaryDirectory() as scratch:
        date_changelog(top, version, today)
        set_version(top, version)
        built = build(top, Path(scratch))
        check(top, built)
        git(top, "commit", "--quiet", "--all", "--message", f"Version {version}")
        git(top, "tag", "--annotate", f"v{version}", "--message", f"Version {version}")
        (top / "dist").mkdir(exist_ok=True)
        return [Path(shutil.copy(each, top / "dist")) for each in built]


def require_clean(top: Path) -> None:
    """Refuse a tree with changes, because an archive would hold what no commit has."""
    if changes := git(top, "status", "--porcelain"):
        raise Refused(f"commit these first:\n{changes.rstrip()}")


def require_greater(top: Path, version: str) -> None:
    """Refuse a version that is not greater than the version of the project, and than each that was tagged."""
    if not re.fullmatch(r"\d+\.\d+\.\d+((a|b|rc)\d+)?", version):
        raise Refused(f"{version} is no version such as 0.2.0 or 0.2.0rc1")
    for earlier in [version_of(top), *map(_version_of_tag, git(top, "tag", "--list", "v*").split())]:
        if earlier is not None and Version(version) <= Version(earlier):
            raise Refused(f"{version} is not greater than {earlier}")


def require_notes(top: Path) -> None:
    """Refuse a changelog that says nothing of the release."""
    _, _, notes = (top / CHANGELOG).read_text().partition(_UNRELEASED)
    if not notes.partition("\n## ")[0].strip():
        raise Refused(f"{CHANGELOG} has nothing under {_UNRELEASED.strip()}")


def require_twine() -> None:
    """Refuse to begin without the program that checks the archives."""
    if run("-m", "twine", "--version").returncode:
        raise Refused("twine is missing; run: pip install -e '.[dev]'")


@contextmanager
def unchanged_if_refused(top: Path) -> Iterator[None]:
    """Take all changes of files back where the release is not made."""
    try:
        yield
    except BaseException:
        git(top, "checkout", "--quiet", "HEAD", "--", ".")
        raise


def date_changelog(top: Path, version: str, today: date) -> None:
    """Give what is unreleased the version and its date; later changes come above."""
    path = top / CHANGELOG
    dated = f"{_UNRELEASED}\n## {version} ({today.isoformat()})\n"
    path.write_text(path.read_text().replace(_UNRELEASED, dated, 1))


def set_version(top: Path, version: str) -> None:
    """Set the version wherever it is told."""
    before = version_of(top)
    for name, forms in TOLD.items():
        path = top / name
        text = path.read_text()
        for form in forms:
            old, new = (form.format(version=each, dashed=each.replace(".", "-")) for each in (before, version))
            if old not in text:
                raise Refused(f"{name} does not tell version {before} as {old.strip()!r}")
            text = text.replace(old, new)
        path.write_text(text)


def version_of(top: Path) -> str:
    """Return the version of the project."""
    found: str = tomllib.loads((top / PROJECT).read_text())["project"]["version"]
    return found


def build(top: Path, folder: Path) -> list[Path]:
    """Build the source archive, and the wheel from the source archive."""
    hatchling(top, "sdist", folder)
    (source,) = folder.glob("*.tar.gz")
    with tarfile.open(source) as archive:
        archive.extractall(folder / "source", filter="data")
    (unpacked,) = (folder / "source").iterdir()
    hatchling(unpacked, "wheel", folder)
    return [source, *folder.glob("*.whl")]


def hatchling(source: Path, kind: str, folder: Path) -> None:
    """Build one kind of archive into a folder."""
    built = run("-m", "hatchling", "build", "--target", kind, "--directory", str(folder), cwd=source)
    if built.returncode:
        raise Refused(f"the {kind} cannot be built:\n{built.stdout}{built.stderr}")


def check(top: Path, archives: Sequence[Path]) -> None:
    """Refuse archives with other contents than the list, or with a description that an index would not show."""
    for each in archives:
        if differences := list(differences_of(top, each)):
            raise Refused("\n".join([f"{each.name} is not what .ci/contents.toml lists:", *differences]))
    checked = run("-m", "twine", "check", "--strict", *map(str, archives))
    if checked.returncode:
        raise Refused(f"twine check:\n{checked.stdout}{checked.stderr}")


def differences_of(top: Path, archive: Path) -> Iterator[str]:
    """Yield what an archive has too much, and what it lacks."""
    kind = "wheel" if archive.suffix == ".whl" else "sdist"
    wanted, found = listed(top, kind), {name for name in names_in(archive) if not OF_THE_FORMAT.fullmatch(name)}
    yield from (f"+ {name}" for name in sorted(found - wanted))
    yield from (f"- {name}" for name in sorted(wanted - found))


def listed(top: Path, kind: str) -> set[str]:
    """Return the names that the list gives one kind of archive."""
    places: dict[str, str] = tomllib.loads((top / ".ci" / "contents.toml").read_text())[kind]
    found = set()
    for name in git(top, "ls-files", "-z", "--cached", "--others", "--exclude-standard").split("\0"):
        first, slash, rest = name.partition("/")
        if first in places and (top / name).is_file():
            found.add(f"{places[first]}{slash}{rest}")
    return found


def names_in(archive: Path) -> set[str]:
    """Return the files of an archive; those of a source without its folder."""
    if archive.suffix == ".whl":
        with zipfile.ZipFile(archive) as wheel:
            return set(wheel.namelist())
    with tarfile.open(archive) as source:
        return {each.name.partition("/")[2] for each in source.getmembers() if each.isfile()}


def git(top: Path, *arguments: str) -> str:
    """Run git; return what it wrote."""
    ended = subprocess.run(["git", *arguments], cwd=top, capture_output=True, text=True, check=False)  # noqa: S607
    if ended.returncode:
        raise Refused(f"git {arguments[0]}: {ended.stderr.strip()}")
    return ended.stdout


def run(*arguments: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Run a Python program of this environment."""
    return subprocess.run([sys.executable, *arguments], cwd=cwd, capture_output=True, text=True, check=False)


def _version_of_tag(tag: str) -> str | None:
    """Return the version of a tag; None of a tag that stands for something else."""
    try:
        return str(Version(tag.removeprefix("v")))
    except InvalidVersion:
        return None


def main(arguments: Sequence[str]) -> None:
    """Run a release, or the checks alone."""
    match list(arguments):
        case ["--check", first, *more]:
            check(TOP, [Path(each) for each in (first, *more)])
        case [version] if not version.startswith("-"):
            archives = release(TOP, version, datetime.now(UTC).date())
            print(f"v{version} is tagged, and nothing was uploaded:", *archives, sep="\n")  # noqa: T201
        case _:
            raise Refused("usage: python .ci/release.py VERSION, or --check FILE…")


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except Refused as refused:
        sys.exit(f"{refused}")
