"""Version 0.1.0, built from the history of the repository, to run beside this version."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import IO, Any

import pytest

from tests.support.programs import NOTHING_MORE, ROOT

#: The last commit whose tables are those of the first revision. By its hash, because a clone may lack tags.
COMMIT = "6c6fe7de181f7cb6033cc642e4f4a9bf245798d9"


def build(folder: Path) -> Earlier:
    """Build the wheel of 0.1.0 and unpack it into `folder`; a test is skipped where neither git nor its tool is."""
    if not (ROOT / ".git").exists():
        pytest.skip("version 0.1.0 is built from the history, which a source distribution lacks")
    if find_spec("hatch_fancy_pypi_readme") is None and not os.environ.get("CI"):
        pytest.skip("a wheel is built with hatch-fancy-pypi-readme, of the extra dev")
    source, package = folder / "source", folder / "package"
    source.mkdir()
    unpack_source(ROOT, source)
    wheel = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    subprocess.run(wheel, cwd=source, check=True, capture_output=True, timeout=120)
    (built,) = folder.glob("*.whl")
    zipfile.ZipFile(built).extractall(package)
    return Earlier(package)


def unpack_source(repository: Path, folder: Path) -> None:
    """Write the files of `COMMIT` into `folder`."""
    git = ["git", "-C", str(repository)]
    if subprocess.run([*git, "cat-file", "-e", f"{COMMIT}^{{commit}}"], capture_output=True, check=False).returncode:
        pytest.fail(f"{COMMIT:.8} is not in this clone: run git fetch --unshallow", pytrace=False)
    archive = subprocess.run([*git, "archive", "--format=zip", COMMIT], check=True, capture_output=True, timeout=120)
    packed = folder / "source.zip"
    packed.write_bytes(archive.stdout)
    zipfile.ZipFile(packed).extractall(folder)


class Earlier:
    """Programs of 0.1.0, with the other packages of this environment."""

    def __init__(self, package: Path) -> None:
        self._package = package

    def program(
        self,
        arguments: Sequence[str],
        *,
        environment: Mapping[str, str] = NOTHING_MORE,
        stdin: int | None = None,
        stdout: IO[Any] | int | None = None,
        stderr: IO[Any] | int | None = None,
    ) -> subprocess.Popen[str]:
        """Start a program: `arguments` as an interpreter takes them. Modules of the tests are those of today."""
        path = os.pathsep.join((str(self._package), str(ROOT)))
        variables = {**os.environ, **environment, "PYTHONPATH": path}
        command = [sys.executable, *arguments]
        # Not in the folder of this version, which an interpreter would import first.
        return subprocess.Popen(
            command, cwd=self._package, env=variables, stdin=stdin, stdout=stdout, stderr=stderr, text=True
        )

    def run(self, *arguments: str, **environment: str) -> tuple[int, str]:
        """Run a program to its end; return its exit code, and what it wrote."""
        program = self.program(arguments, environment=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        said, _ = program.communicate(timeout=120)
        return program.returncode, said
