"""The order service of the examples, as the demo runs it."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any


def path_of(example: str) -> Path:
    """Return the path of an example: in the package when installed from a wheel, else at the top of the repository."""
    package = Path(__file__).resolve().parents[2]
    shipped = package / "_examples"
    return (shipped if shipped.is_dir() else package.parent / "examples") / example


def order_service() -> Any:
    """Load the module of the order service, on the database that OUTBOX_DATABASE names."""
    spec = importlib.util.spec_from_file_location("orders", path_of("orders.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # Its classes are looked up by the name of their module.
    sys.modules["orders"] = module
    spec.loader.exec_module(module)
    return module
