"""The program that makes releases, as a module: its file is in no package."""

import importlib.util
from types import ModuleType

from tests.support.programs import ROOT


def _loaded() -> ModuleType:
    found = importlib.util.spec_from_file_location("release", ROOT / ".ci" / "release.py")
    assert found is not None and found.loader is not None
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    return module


making = _loaded()
