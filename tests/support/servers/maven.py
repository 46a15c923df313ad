"""What Maven fetches from Maven Central, for programs of Java."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from pathlib import Path

from outbox.testing.servers.local import ServerMissing

_POM = """<project xmlns="http://maven.apache.org/POM/4.0.0">
  <modelVersion>4.0.0</modelVersion><groupId>outbox</groupId><artifactId>{name}</artifactId><version>1</version>
  <dependencies>{dependencies}</dependencies>
</project>
"""


def class_path(name: str, *artifacts: str) -> str:
    """Return the class path of artifacts, each `group:artifact:version`. Maven fetches them at the first call; a file
    remembers where they are, under the name and the version of the first.

    Raises:
        ServerMissing: there is neither Java nor Maven, or Maven cannot fetch it.
    """
    remembered = _cache_folder() / f"{name}-{artifacts[0].rpartition(':')[2]}.classpath"
    found = remembered.read_text() if remembered.exists() else ""
    if found and all(Path(jar).exists() for jar in found.split(os.pathsep)):
        return found
    if not (shutil.which("java") and shutil.which("mvn")):
        raise ServerMissing(f"no {name}: install Java 17 and Maven, which fetches it from Maven Central")
    found = _fetched(name, artifacts)
    # Several processes may come here at once: each replaces the file as a whole.
    mine = remembered.with_suffix(f".{os.getpid()}")
    mine.write_text(found)
    mine.replace(remembered)
    return found


def _fetched(name: str, artifacts: tuple[str, ...]) -> str:
    parts = ("groupId", "artifactId", "version")
    dependencies = (
        "".join(f"<{part}>{value}</{part}>" for part, value in zip(parts, each.split(":"), strict=True))
        for each in artifacts
    )
    pom = _POM.format(name=name, dependencies="".join(f"<dependency>{each}</dependency>" for each in dependencies))
    with tempfile.TemporaryDirectory(prefix="outbox-maven-") as folder:
        Path(folder, "pom.xml").write_text(pom)
        command = ["mvn", "-q", "-B", "dependency:build-classpath", "-Dmdep.outputFile=found"]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise ServerMissing(f"Maven cannot fetch it: {(done.stdout + done.stderr)[-1000:]}")
        return Path(folder, "found").read_text().strip()


def _cache_folder() -> Path:
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "outbox"
    folder.mkdir(parents=True, exist_ok=True)
    return folder
