"""All scenarios of the matrix."""

from tests.scenarios.matrix import endings, troubles
from tests.scenarios.matrix.joining import JOININGS
from tests.scenarios.matrix.table import WRITTEN

#: Those that are written out in their modules, and those of a session that joins.
SCENARIOS = [*WRITTEN, *JOININGS]

__all__ = ["SCENARIOS", "endings", "troubles"]
