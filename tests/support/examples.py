"""Running the examples as their first lines say."""

import re
import subprocess
from pathlib import Path

EXAMPLES = Path(__file__).parents[2] / "examples"


def typed(example: str) -> list[str]:
    """What an example says to type."""
    found = re.findall(r"^    (\S.*)$", (EXAMPLES / example).read_text().split('"""')[1], re.MULTILINE)
    program = example.rpartition("/")[2]
    return [line.replace(f"python {program}", f"python {EXAMPLES / example}") for line in found]


def run(*lines: str) -> str:
    """What a shell prints to standard output; every line must succeed."""
    script = "\n".join(("set -e", *lines))
    return subprocess.run(["/bin/sh", "-c", script], check=True, capture_output=True, text=True).stdout
