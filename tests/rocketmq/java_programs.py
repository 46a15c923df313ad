"""Programs with RocketMQ's official Java client, compiled with the program of the page."""

import os
import subprocess
from pathlib import Path

from tests.conftest import started
from tests.support.pages import TOP, blocks
from tests.support.servers.maven import class_path

_PAGE = (TOP / "docs" / "rocketmq-clients.md").read_text()
_CLIENT = "org.apache.rocketmq:rocketmq-client-java:5.0.8"
_HERE = Path(__file__).parent


def compiled(folder: Path, name: str) -> list[str]:
    """Compile a program of this folder with that of the page; return the command without arguments."""
    jars = started(lambda: class_path("rocketmq-client-java", _CLIENT))
    shop = folder / "Shop.java"
    shop.write_text(blocks(_PAGE, "java")[0])
    subprocess.run(["javac", "-cp", jars, "-d", folder, shop, _HERE / f"{name}.java"], check=True)
    # The client writes its log below the home folder.
    return ["java", f"-Duser.home={folder}", "-cp", f"{folder}{os.pathsep}{jars}", name]
