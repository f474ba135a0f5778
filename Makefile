# `make demo` and `make test` install everything they need on a fresh machine with Python 3.11 or later.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
SEED ?= 1
COUNT ?=

.PHONY: demo test together check soak mutants compare compare-bench docs wheel clean

demo: $(VENV)/installed
	$(BIN)/andon demo

# Tests that measure how soon something is noticed run after the others, one at a time.
test: $(VENV)/installed-test
	$(MAKE) --no-print-directory -j 2 check together
	$(BIN)/python -m pytest -m "not soak and alone" $$(grep -rl --include='test_*.py' mark.alone tests)

together: $(VENV)/installed-test
	$(BIN)/python -m pytest -m "not soak and not alone" -n 3 --dist worksteal

check: $(VENV)/installed-test
	$(BIN)/ruff check andon tests examples
	$(BIN)/ruff format --check andon tests examples
	$(BIN)/mypy

# The long proofs: hundreds of kills, thousands of bit flips. SEED=7 COUNT=300 make soak
soak: $(VENV)/installed-test
	ANDON_SOAK_SEED=$(SEED) ANDON_SOAK_COUNT=$(COUNT) $(BIN)/python -m pytest -m soak --timeout 3600

# Put many small faults into a copy of the code, one by one, and report which test notices each.
# IDS="no-fsync tree-in-halves" chooses some.
mutants: $(VENV)/installed-test
	$(BIN)/python -m tests.mutants $(IDS)

# Compare the step of this tree with that of another commit, in one run. SETTINGS="--model.preset=30m --train.slots=2"
BEFORE ?= HEAD
PAIRS ?=
SETTINGS ?=
compare: $(VENV)/installed-test
	$(BIN)/python -m tests.bench.compare $(BEFORE) $(PAIRS:%=--pairs %) $(SETTINGS)

# Compare a benchmark of this tree with that of another commit. BENCH="checkpoint --preset 30m" FIGURES=stall_s,step_s
BENCH ?= transport
FIGURES ?= ms
compare-bench: $(VENV)/installed-test
	$(BIN)/python -m tests.bench.compare_bench $(BEFORE) $(PAIRS:%=--pairs %) --figures $(FIGURES) $(BENCH)

# Build the book as a site in build/site; a dead link is an error.
docs: $(VENV)/installed-docs
	rm -rf build/docs build/site && mkdir -p build && cp -r docs build/docs
	$(BIN)/andon config reference > build/docs/configuration.md
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

wheel: $(VENV)/installed
	$(BIN)/python -m pip wheel --quiet --disable-pip-version-check --no-deps --wheel-dir dist .

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/installed: $(VENV)/bin/python pyproject.toml constraints.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e .
	touch $@

$(VENV)/installed-test: $(VENV)/installed
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[test]"
	touch $@

$(VENV)/installed-docs: $(VENV)/installed
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[docs]"
	touch $@

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
