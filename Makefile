# make quickstart | test | lint | format | docs | clean      PYTHON=python3.12 picks another interpreter
SHELL  := /bin/bash
VENV   ?= .venv
BIN    := $(VENV)/bin
ARGS   ?=
comma  := ,
# A GPU machine and a machine without one get different builds of torch.
KIND   := $(shell nvidia-smi -L >/dev/null 2>&1 && echo gpu || echo cpu)
PINS   := constraints/$(KIND).txt
# Only a machine with a GPU has profiles to read.
EXTRAS := cute,cutile,lab$(if $(filter gpu,$(KIND)),$(comma)profile)
BASE   := $(VENV)/.installed-$(KIND)
DEV    := $(VENV)/.installed-$(KIND)-dev
PIP    := $(BIN)/python -m pip --disable-pip-version-check --no-input
# The first interpreter that is new enough, when PYTHON is not given; python3 when none is, so that the error names it.
PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11; do \
	"$$p" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1 && echo "$$p" && exit; done; echo python3)

.DEFAULT_GOAL := help
.PHONY: help install quickstart test lint format docs pictures clean
.DELETE_ON_ERROR:

help: ## this list
	@sed -n 's/^\([a-z]*\):.*## /  make \1\t/p' $(firstword $(MAKEFILE_LIST)) | expand -t 20

quickstart: $(BASE) ## install what is missing, compare the kernels (with a GPU or without), write the report
	$(BIN)/mla-var3 sweep experiment=quickstart $(ARGS)
	$(BIN)/mla-var3 report

install: $(BASE) ## the virtual environment only

# worksteal: a file's tests stay in one worker, so that pages and clusters that they share are made once.
test: $(DEV) ## install what is missing, then run the tests; ARGS='-k name' selects
	$(BIN)/python -m pytest -n 2 --dist worksteal $(ARGS)

lint: $(DEV) ## ruff, mypy, the arrows between rooms, and devlogs and knowledge against their records and what they name
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache
	$(BIN)/mla-var3 devlog check
	$(BIN)/mla-var3 knowledge check --frozen

format: $(DEV) ## rewrite the sources as ruff likes them
	$(BIN)/ruff check --fix-only .
	$(BIN)/ruff format .

docs: $(DEV) ## the documentation as a site, in out/site
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build

pictures: $(DEV) ## the pictures of README and docs from results/; screenshots need chromium
	$(BIN)/python scripts/report_pictures.py docs/pictures

clean: ## remove caches and built packages; .venv, out/ and results/ stay
	rm -rf build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis src/*.egg-info
	find src tests scripts -name __pycache__ -type d -prune -exec rm -rf {} + 2>/dev/null || true

$(BIN)/python:
	@command -v "$(PYTHON)" >/dev/null 2>&1 || \
	  { echo "mla_var3 needs Python 3.11 or later, and $(PYTHON) is not here: install it, or name one: make PYTHON=/path/to/python3.11" >&2; exit 1; }
	@"$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "mla_var3 needs Python 3.11 or later, and $(PYTHON) is $$("$(PYTHON)" -V 2>&1): install one, or name it: make PYTHON=/path/to/python3.11" >&2; exit 1; }
	@"$(PYTHON)" -c 'import ensurepip, venv' 2>/dev/null || \
	  { echo "$(PYTHON) cannot make virtual environments: install its venv module (Debian, Ubuntu: apt install python3-venv)" >&2; exit 1; }
	"$(PYTHON)" -m venv $(VENV)

# Releases of cuda-tile besides the installed one that the interpreter follows: each in a folder of its own, for its tests.
OLDER_CUTILE := 1.6.0

# A CPU build of torch: where pip already finds one (2.13.0+cpu), it is taken; else PyTorch's own index is asked, if it
# can be reached. Without either, pip takes the CUDA build, which works and is several GB larger.
$(VENV)/.torch-cpu: constraints/cpu.txt | $(BIN)/python
	@index=; $(BIN)/python -c 'import urllib.request as u; u.urlopen("https://download.pytorch.org/whl/cpu/torch/", timeout=5)' \
	  >/dev/null 2>&1 && index="--extra-index-url https://download.pytorch.org/whl/cpu"; \
	echo "Installing torch for the CPU (no GPU answers nvidia-smi -L)"; $(PIP) install -qq -c $< $$index torch
	@touch $@

$(VENV)/.torch-gpu: | $(BIN)/python
	@touch $@

$(BASE): pyproject.toml $(PINS) $(VENV)/.torch-$(KIND) | $(BIN)/python
	@echo "Installing mla_var3 into $(VENV) with $(PINS) (a minute or two, about 3 GB)"
	@$(PIP) install -qq -c $(PINS) -e '.[$(EXTRAS)]'
	@touch $@

$(DEV): $(BASE)
	@echo "Installing the test and lint tools into $(VENV)"
	@$(PIP) install -qq -c $(PINS) -e '.[$(EXTRAS),jax,dev,docs]'
	@for v in $(OLDER_CUTILE); do \
	  $(PIP) install -qq --no-deps --upgrade --target $(VENV)/cuda-tile-$$v cuda-tile==$$v || exit 1; done
	@touch $@
