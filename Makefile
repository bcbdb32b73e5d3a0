# Set-up is part of each target: `make demo` and `make test` work on a machine that has
# Python >= 3.11 and nothing else. The second run finds the stamp file and is quick.

VENV := .venv
PY := $(VENV)/bin/python
PIP := $(PY) -m pip install --quiet --disable-pip-version-check
# PYTHON=... chooses the interpreter of a new environment; otherwise the first that is new enough.
PYTHON :=
CANDIDATES := $(or $(PYTHON),python3 python3.13 python3.12 python3.11)

.PHONY: help demo test parity lint bench clean
.DEFAULT_GOAL := help

help:
	@echo "make demo     train a target and its draft (about nine minutes) and compare decoding"
	@echo "make test     format check, lint, types and the test suite, on a CPU"
	@echo "make parity   compare with transformers on torch (installs both)"
	@echo "make lint     format check, lint and types only"
	@echo "make bench    run every script in benchmarks/"
	@echo "make clean    remove the environment, caches and build output"
	@echo
	@echo "PYTHON=/path/to/python chooses the interpreter for a new $(VENV) (>= 3.11)."

# A run that is done is passed over, so the second time only decodes.
demo: $(VENV)/.installed-test
	$(PY) train.py --config configs/quickstart.yaml
	$(PY) decode.py --config configs/decode.yaml --compare \
		--prompts runs/quickstart/draft/prompts.jsonl

test: lint
	$(PY) -m pytest -n auto --dist loadfile

parity: $(VENV)/.installed-parity
	$(PY) -m pytest -m parity tests

lint: $(VENV)/.installed-test
	$(PY) -m ruff format --check .
	$(PY) -m ruff check .
	$(PY) -m pyright --pythonpath $(PY)

bench: $(VENV)/.installed-parity
	@set -e; for script in benchmarks/*.py; do \
		if [ ! -f "$$script" ]; then echo "no scripts in benchmarks/" >&2; exit 1; fi; \
		echo "$$script"; $(PY) "$$script"; \
	done

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(VENV)/.created:
	@for candidate in $(CANDIDATES); do \
		if "$$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then \
			echo "creating $(VENV) with $$candidate"; \
			"$$candidate" -m venv $(VENV) && touch $@; exit; \
		fi; \
	done; \
	echo "No Python >= 3.11 among: $(CANDIDATES)." >&2; \
	echo "Install one, or name it: make PYTHON=/path/to/python <target>" >&2; \
	exit 1

$(VENV)/.installed-test: pyproject.toml | $(VENV)/.created
	$(PIP) --editable '.[test]'
	@touch $@

$(VENV)/.installed-parity: pyproject.toml | $(VENV)/.created
	$(PIP) --editable '.[test,parity]'
	@touch $@ $(VENV)/.installed-test
