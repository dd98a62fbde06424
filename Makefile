# make train: trains a small language model on this machine, in about five minutes after installation.
# make test:  runs the quick tests, on two workers: a file of tests on one of them, so that its fixtures are made once, and
# in the order of the files: xdist would put files of few tests last, and a long one of them would leave a worker idle.
# make test-slow: those that kill runs, lose hosts or train for long.
# make check: lint, types, layers, sizes, names, variables, opened files, help texts.  make bench: the quick benchmarks.
# make site:  the documentation as a site with search and an API reference, in site/; reads no network when viewed.
# make gpu:   on a machine with a GPU, the tests and bars that need one.
PYTHON ?= python3
BIN := .venv/bin
AGAIN := --last-failed --last-failed-no-failures none

.PHONY: train test test-slow check types rules bench gpu docs site clean
.DELETE_ON_ERROR:

train: .venv/run.stamp
	$(BIN)/shoestring train quickstart --workers auto

# Tests that measure time can fail beside another worker, so what has failed runs again alone, and has to pass there.
test: .venv/dev.stamp
	$(BIN)/python -m pytest -m "not slow" -n 2 --dist loadscope --no-loadscope-reorder || $(BIN)/python -m pytest -m "not slow" $(AGAIN)

test-slow: .venv/dev.stamp
	$(BIN)/python -m pytest -m slow -n 2 --dist loadscope --no-loadscope-reorder || $(BIN)/python -m pytest -m slow $(AGAIN)

check: .venv/dev.stamp
	@$(MAKE) --no-print-directory -j 2 -O types rules

types:
	$(BIN)/pyrefly check

# Without ruff's cache: how imports are sorted depends on which files exist, and the cache looks at each file alone.
rules:
	$(BIN)/ruff format --no-cache --check .
	$(BIN)/ruff check --no-cache .
	$(BIN)/lint-imports
	$(BIN)/python -m tools.sizes
	$(BIN)/python -m tools.names
	$(BIN)/python -m tools.variables
	$(BIN)/python -m tools.opens
	$(BIN)/python -m tools.help_texts
	$(BIN)/python -m tools.reference --check
	$(BIN)/python -m benchmarks.evidence --check

bench: .venv/dev.stamp
	$(BIN)/python -m benchmarks.foundation

gpu: .venv/dev.stamp
	$(BIN)/python -m pytest -m gpu
	$(BIN)/python -m benchmarks.gpu

docs: .venv/dev.stamp
	$(BIN)/python -m tools.reference
	$(BIN)/python -m benchmarks.evidence

# Every link and anchor is checked. Searching needs a server: python3 -m http.server --directory site
site: .venv/site.stamp
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --site-dir site

.venv/run.stamp: pyproject.toml constraints.txt
	@echo "shoestring: installing into .venv (torch is about 200 MB on a CPU)"
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "shoestring needs Python 3.11 or newer; name one with make PYTHON=python3.x")'
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt torch
	$(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt -e .
	@touch $@

.venv/dev.stamp: .venv/run.stamp requirements-dev.txt requirements-evaluate.txt tests/clients/package.json
	@echo "shoestring: installing what the tests and checks need"
	$(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt -r requirements-dev.txt
	$(BIN)/python -m pip install -q --disable-pip-version-check --no-deps -r requirements-evaluate.txt
	npm install --prefix tests/clients --no-package-lock --no-audit --no-fund --silent || echo "without npm, the tests of clients in JavaScript are skipped, and those of the recipe reply fail"
	@touch $@

.venv/site.stamp: .venv/run.stamp requirements-site.txt
	@echo "shoestring: installing what builds the site"
	$(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt -r requirements-site.txt
	@touch $@

clean:
	rm -rf .venv
