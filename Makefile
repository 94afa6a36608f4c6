# Two commands do everything on a fresh machine: `make demo` and `make test`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: demo test test-without-compiler tables lint format types layers clean

demo: $(VENV)/installed
	$(BIN)/orca-hf demo

test: $(VENV)/installed
	$(BIN)/python -m pytest -n 2 $(PYTEST_ARGS)

# What computes tokens, once more as it runs where there is no C++ compiler.
WITHOUT_COMPILER := $(addprefix tests/,test_generate.py test_architectures.py test_adapters.py test_packed_linear.py \
	test_fused_forwards.py test_deterministic.py test_speculation.py test_fuzz.py)
test-without-compiler: $(VENV)/installed
	ORCA_HF_COMPILE=0 $(BIN)/python -m pytest -n 2 $(WITHOUT_COMPILER) $(PYTEST_ARGS)

tables: $(VENV)/installed
	$(BIN)/python -m pytest -n 2 --write-tables README.md tests/test_architecture_sweep.py tests/test_options.py

lint: $(VENV)/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: $(VENV)/installed
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

types: $(VENV)/installed
	$(BIN)/mypy

layers: $(VENV)/installed
	$(BIN)/python -m pytest -q --noconftest tests/test_layers.py

# torch comes first and pinned, so that nothing that depends on it picks another build.
$(VENV)/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --constraint constraints.txt torch
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[dev]"
	touch $@

clean:
	rm -rf $(VENV) dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
