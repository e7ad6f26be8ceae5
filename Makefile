# make demo   from a folder of images to a fine-tuned ViT, in a few minutes on two CPU cores
# make test   every test            make lint   format, rules, types, import direction
# DATA=fashion-mnist make demo      the same on 70,000 images (Debian: apt-get install dataset-fashion-mnist)

SHELL  := /bin/bash
PYTHON ?= python3
VENV   ?= .venv
DATA   ?= digits
BIN    := $(VENV)/bin

.PHONY: demo test lint format docs clean

demo: $(VENV)/.demo
	$(BIN)/python launch/demo/demo.py --data $(DATA)

test: $(VENV)/.dev
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest

lint: $(VENV)/.dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/codespell vitscale launch configs tests docs README.md CHANGELOG.md CONTRIBUTING.md
	$(BIN)/python docs/generate.py --check

format: $(VENV)/.dev
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

docs: $(VENV)/.dev
	$(BIN)/python docs/generate.py

$(VENV)/.base: pyproject.toml hatch_build.py vitscale/data/jpeg_crop.c
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --upgrade pip
	$(BIN)/python -m pip install --disable-pip-version-check --progress-bar off --editable .
	touch $@

$(VENV)/.demo: $(VENV)/.base
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable ".[demo]"
	touch $@

$(VENV)/.dev: $(VENV)/.base
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable ".[dev]"
	touch $@

clean:
	rm -rf $(VENV) runs build dist
