"""A run keeps each row when it is there: what fails later, or stops the run, takes no other row away."""

import json
from contextlib import nullcontext
from pathlib import Path

import pytest

from benchmarks import __main__ as command
from benchmarks import report
from benchmarks.measure import Measurement, at_most


def measured(name: str):
    """A benchmark that finds one thing."""
    return lambda _site: [Measurement(name=name, goal=at_most(1), unit="s", ours=[0.5], other=[1.0])]


def raising(error: BaseException):
    """A benchmark that ends otherwise."""

    def benchmark(_site):
        raise error

    return benchmark


@pytest.fixture
def run(monkeypatch, tmp_path: Path):
    """Run benchmarks that stand in for the real ones."""
    monkeypatch.setattr(command, "PostgresServer", lambda **_: nullcontext())
    monkeypatch.setattr(report, "draw", lambda run, path: path.write_text(" ".join(run.measured)))

    def run(**benchmarks):
        monkeypatch.setattr(command, "BENCHMARKS", {(name,): each for name, each in benchmarks.items()})
        monkeypatch.setattr(command, "NAMES", tuple(benchmarks))
        command.main(["--out", str(tmp_path)])

    return run


def kept(folder: Path):
    """What programs read of a run, the ratios of its page, and what its picture shows."""
    rows = [row for row in (folder / "results.md").read_text().splitlines() if row.startswith("| `")]
    programs = list(json.loads((folder / "results.json").read_text()))
    return programs, [row.split(" | ")[1] for row in rows], (folder / "results.png").read_text()


def test_a_benchmark_that_fails_takes_only_its_own_row_away(run, capsys, tmp_path):
    with pytest.raises(SystemExit, match="failed, and not measured: second"):
        run(first=measured("first"), second=raising(OSError("no server")), third=measured("third"))

    assert kept(tmp_path) == (["first", "third"], ["0.50", "not measured", "0.50"], "first third")
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == ["benchmark", "first", "third"]


def test_a_run_that_is_stopped_has_written_what_was_measured(run, tmp_path):
    with pytest.raises(KeyboardInterrupt):
        run(first=measured("first"), second=raising(KeyboardInterrupt()), third=measured("third"))

    assert kept(tmp_path) == (["first"], ["0.50", "not measured", "not measured"], "first")
