# The targets that README, CONTRIBUTING and CI name. Only Python 3.11 or newer and make are needed.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed

# What depends on protected names of Lightning and torch.
TESTS_OF_VERSIONS := tests/adapter/module tests/adapter/gradients \
	tests/adapter/test_training_loop.py tests/callbacks/test_lightning_internals.py
# What compares numbers, which other processors round otherwise.
TESTS_OF_NUMBERS := tests/adapter/gradients tests/adapter/module tests/callbacks/checkpoint tests/zoo
LIGHTNING := $(shell sed -n 's/.*"\(lightning>=[^"]*\)".*/\1/p' pyproject.toml)

# The tests start hundreds of processes; without stored bytecode each of them compiles genlight anew.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test test-all check format messages reference zoo faults security shake versions newest-lightning lock clean

demo: $(INSTALLED)  ## train the digits model through the whole path
	$(BIN)/genlight run --fresh examples/digits/job.json

test: $(INSTALLED)  ## what every change must pass; some minutes on two cores
	$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder

# Four processes on two cores: long tests wait for signals, deadlines and Slurm most of their time.
test-all: $(INSTALLED)  ## these and everything else that needs no GPU: long runs, kills, series of ranks, a real Slurm
	$(BIN)/python -m pytest -m "not gpu" -n 4 --dist loadfile --no-loadscope-reorder

check: $(INSTALLED)  ## lint, format, types, import contracts
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache

format: $(INSTALLED)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

messages: $(INSTALLED)  ## tests/messages.json, after the wording of errors was changed on purpose
	$(BIN)/python -m pytest -q -n 2 --dist loadfile --no-loadscope-reorder --write-messages -m "not gpu"

reference: $(INSTALLED)  ## the parts of the package READMEs that are made from docstrings and types
	$(BIN)/python examples/make_reference.py

zoo: $(INSTALLED)  ## every class of tests/zoo in every mode, with its resume; writes adapter/classes.md
	cd tests && ../$(BIN)/python -W ignore -m zoo.table

faults: $(INSTALLED)  ## the long fault-injection runs
	GENLIGHT_LONG_FAULTS=1 $(BIN)/python -m pytest -m "not gpu" tests/faults

security: $(INSTALLED)  ## the attacks of SECURITY.md, with long runs of generated input
	GENLIGHT_LONG_FAULTS=1 $(BIN)/python -m pytest -m "not gpu" tests/security

shake: $(INSTALLED)  ## the tests while processes pause, disks are slow and threads start late; and with older kernels
	$(BIN)/python tests/shaken
	ATEN_CPU_CAPABILITY=default MKL_ENABLE_INSTRUCTIONS=SSE4_2 $(BIN)/python tests/shaken $(TESTS_OF_NUMBERS)
	ATEN_CPU_CAPABILITY=avx2 $(BIN)/python tests/shaken $(TESTS_OF_NUMBERS)

versions: $(INSTALLED)  ## what depends on torch, under its lowest and newest release and later Pythons; writes CONTRIBUTING.md; many GB
	$(BIN)/python tests/versions.py $(TESTS_OF_VERSIONS)

newest-lightning: $(INSTALLED)  ## what depends on Lightning, under the newest release of the supported range
	$(BIN)/python -m pip install --quiet --upgrade --no-deps --target .versions/lightning "$(LIGHTNING)"
	PYTHONPATH=$(CURDIR)/.versions/lightning $(BIN)/python -m pytest -m "not gpu" $(TESTS_OF_VERSIONS)

lock: $(INSTALLED)  ## write down the versions that are installed now, and the hashes of their files
	$(BIN)/python -m pip freeze --exclude-editable | sed 's/+cpu//' > constraints.new
	{ head -1 constraints.txt; cat constraints.new; } > constraints.tmp && mv constraints.tmp constraints.txt && rm constraints.new
	$(PYTHON) -m venv .versions/uv && .versions/uv/bin/python -m pip install --quiet uv
	grep -v "^torch==" constraints.txt | .versions/uv/bin/uv pip compile --quiet --no-deps --generate-hashes --no-header \
		--no-annotate --output-file hashes.new -
	{ head -1 hashes.txt; cat hashes.new; } > hashes.tmp && mv hashes.tmp hashes.txt && rm hashes.new

clean:
	rm -rf $(VENV) .versions .mypy_cache .ruff_cache .pytest_cache .hypothesis dist runs

# The stamp is newer than these files only after a complete install, so an interrupted one starts again.
EXAMPLES := $(wildcard examples/*/requirements.txt)
$(INSTALLED): pyproject.toml constraints.txt hashes.txt $(EXAMPLES)
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --require-hashes --no-deps --requirement hashes.txt
	$(BIN)/python -m pip install --quiet --constraint constraints.txt torch
	$(BIN)/python -m pip install --quiet --no-deps --no-build-isolation --editable .
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --no-deps --upgrade --target $(VENV)/guides \
		$(EXAMPLES:%=--requirement %)
	touch $@
