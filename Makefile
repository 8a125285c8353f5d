# `make demo` and `make test` need Python >= 3.11, git and a C compiler; they make .venv and install into it.
# A torch that PYTHON already has is used as it is, but for one in an environment, which .venv would not see. TORCH_INDEX=URL installs torch from that wheel index (a GPU build, say).
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
HAS_TORCH := $(shell $(PYTHON) -c 'import sys, torch; print(1) if sys.prefix == sys.base_prefix else None' 2>/dev/null)
RECIPE ?= recipes/reference-cpu.toml
DATA ?= ../shared/data

.PHONY: demo test suite test-slow test-native test-gpu bench bench-wide bench-gpu native lint size mutants train clean

demo: $(VENV)/ready
	$(BIN)/outrider demo

test: $(VENV)/ready
	$(MAKE) -j2 suite lint

suite:
	$(BIN)/python -m pytest -n auto --dist worksteal

test-slow: $(VENV)/ready
	$(BIN)/python -m pytest -n auto --dist worksteal -m "slow and not gpu"

# Suites that put nothing of their own in the place of the house's modules, on those in machine code.
test-native: native
	OUTRIDER_HOST=$$($(BIN)/python -c 'from outrider.runtime.native import place; print(place() / "built")') $(BIN)/python -m pytest -n auto --dist worksteal $(patsubst %,tests/test_%.py,bad_input bench cli door draft drafters exits laws models own_program speculation)

test-gpu: $(VENV)/ready
	$(PIP) install -q "nvidia-ml-py"
	$(BIN)/python -m pytest -m gpu

# Rewrites docs/results on this machine (about half an hour once `native` is made; tables of docs/performance.md and docs/scheduling.md).
bench: $(VENV)/ready native
	$(BIN)/outrider bench speed
	$(BIN)/outrider bench widths
	$(BIN)/outrider bench strict
	$(BIN)/outrider bench start
	$(BIN)/outrider bench verdict
	$(BIN)/outrider bench schedule --rounds 3
	$(BIN)/outrider bench guarantee

# The reference target four times as wide (0.37 B parameters, 0.7 GB), the same text at the cost of a larger model (an hour or so).
bench-wide: $(VENV)/ready native
	test -f .train/reference-wide4/tokenizer.json || $(BIN)/outrider bench widen .train/reference-wide4
	$(BIN)/outrider bench speed --target .train/reference-wide4 --name speed-wide4
	$(BIN)/outrider bench schedule --rounds 1 --target .train/reference-wide4 --name schedule-wide4

# The same tables on a CUDA GPU, with the energy that its driver counts and how often a step waits for it, into docs/results/gpu.
bench-gpu: $(VENV)/ready native
	$(PIP) install -q "nvidia-ml-py"
	$(BIN)/outrider bench speed --device cuda --out docs/results/gpu --contenders "stock plain,stock assisted 5,stock assisted dynamic,stock lookup,ours plain,ours lookup,ours model,ours lookup+model,ours plain again"
	$(BIN)/outrider bench speed --device cuda --out docs/results/gpu --name speed-fewer-bits --contenders "ours plain,ours own int8 copy,ours plain int8,ours plain again"
	$(BIN)/outrider bench schedule --device cuda --rounds 2 --out docs/results/gpu
	$(BIN)/outrider bench synthetic --device cuda --shape 8b --compile --contexts 128,2048,8192 --out docs/results/gpu

# The host's part of a step in machine code, for these sources: what a second start would begin (four to nine minutes).
native: $(VENV)/ready
	$(BIN)/python -m outrider.runtime.native_builder

lint: $(VENV)/ready
	$(BIN)/ruff check outrider tests
	$(BIN)/ruff format --check outrider tests
	$(BIN)/mypy outrider
	$(BIN)/lint-imports

# Puts every known bug back in, one at a time, and checks that its test fails.
mutants: $(VENV)/ready
	$(BIN)/python tests/mutants.py

size:
	@git ls-files 'outrider/*.py' | xargs wc -l | sort -n | tail -25

# Trains the reference pair; the same command resumes. See recipes/ and outrider/reference/MODEL_CARD.md.
train: $(VENV)/ready
	$(BIN)/outrider train pretrain --recipe $(RECIPE) --data $(DATA)
	$(BIN)/outrider train collect --recipe $(RECIPE)
	$(BIN)/outrider train distill --recipe $(RECIPE)
	$(BIN)/outrider train judge --recipe $(RECIPE)

$(VENV)/ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(if $(HAS_TORCH),--system-site-packages) $(VENV)
	$(if $(HAS_TORCH),,$(PIP) install -q -c constraints.txt $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) torch)
	$(PIP) install -q $(if $(HAS_TORCH),,-c constraints.txt) -e '.[dev]'
	@touch $@

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache
