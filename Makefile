# Two commands: `make serve` and `make test`. Both set up what they need in .venv.
PYTHON ?= python3
PORT ?= 8080
MODEL ?= smollm2
MINUTES ?= 60
WORKERS ?= 2
BIN := .venv/bin
UV := $(BIN)/uv pip install -q --python $(BIN)/python

.PHONY: serve test lint types unit bench soak clean

serve: .venv/ready
	$(BIN)/onecopy serve $(MODEL) --host 127.0.0.1 --port $(PORT)

test: lint types unit

lint: .venv/ready-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: .venv/ready-dev
	$(BIN)/mypy -p onecopy

unit: .venv/ready-dev
	$(BIN)/pytest -n $(WORKERS) --dist loadfile --cov --cov-report=term:skip-covered

bench: .venv/ready-dev
	$(BIN)/python -m benchmarks

soak: .venv/ready-dev
	$(BIN)/python -m tests.sim.soak --minutes $(MINUTES)

.venv/bin/uv:
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install -q uv

.venv/ready: pyproject.toml | .venv/bin/uv
	$(UV) -e .
	touch $@

.venv/ready-dev: pyproject.toml | .venv/bin/uv
	$(UV) -e . --group dev
	touch .venv/ready $@

clean:
	rm -rf .venv build dist *.egg-info .coverage .mypy_cache .ruff_cache .pytest_cache
