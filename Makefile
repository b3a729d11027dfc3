# make demo | demo-sql | test | fuzz | chaos | models | test-numeric | test-pythons | test-lowest | test-frameworks | test-trackers | test-coexistence | test-vllm | test-verl |
# test-parity | test-containers | test-view | test-first-hour | docs | lint | agents | agents-short; test-long | test-numeric-long | test-pythons-long |
# test-lowest-long | test-coexistence-long | test-vllm-long | test-verl-long | test-first-hour-long: each makes its environment first, once,
# and again when what it is made from changes.
#   PYTHON=python3.12 make test        another interpreter, 3.11 or later
#   make demo ARGS="trainer.steps=5"   settings for the training run
#   make fuzz FUZZ=10000                the number of requests
#   make chaos KILLS=20 FAULTS=         the number of kills, without the table of faults
# pip, which installs torch, listens to its usual variables, such as PIP_EXTRA_INDEX_URL for a CPU-only build. uv installs the rest, in seconds.

PYTHON ?= python3
ARGS ?=
VENV := .venv
LOWEST := .venv-lowest
FRAMEWORKS := .venv-frameworks
TRACKERS := .venv-trackers
COEXISTENCE := .venv-coexistence
CLUSTER := .venv-cluster
DOCS := .venv-docs
BIN := $(VENV)/bin
# One process leaves much of two cores idle, and so do two that start programs and wait for them. A file stays in one process.
TWICE := -n 2 --dist loadfile
# tests/budget.py orders the files.
THRICE := -n 3 --dist loadfile --no-loadscope-reorder
AVX2 := ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2
NUMERIC := tests/backends/torch tests/examples/test_rules_losses.py tests/model tests/signals/torch tests/trainers
EACH_INTEGRATION := $(patsubst %,tests/integrations/test_%.py,contract autogen_agentchat autogen_core genai_spans langchain langgraph openai_agents)
# With more threads than cores, torch's mostly wait for each other.
ONE_THREAD := OMP_NUM_THREADS=1
INSTALLED := $(VENV)/.installed
PIP := $(BIN)/python -m pip --disable-pip-version-check --no-input
# Python compiles what it imports, once, and these packages have tens of thousands of modules.
INSTALL := install --no-compile
UV := uv pip install -q
unexport PYTHONDONTWRITEBYTECODE
TORCH := torch==2.13.0
# The chat templates in its wheel; nothing of it is imported.
TEMPLATES := trl==1.16.0
# Tasks and checker of examples/bfcl; of its dependencies, that part needs only mpmath, which comes with torch.
BFCL := bfcl-eval==2026.3.23

.PHONY: demo demo-sql test test-long fuzz chaos models test-numeric test-numeric-long test-pythons test-pythons-long test-lowest test-lowest-long test-frameworks test-trackers test-coexistence test-coexistence-long test-vllm test-vllm-long test-verl test-verl-long \
	test-parity test-containers test-view test-first-hour test-first-hour-long agents agents-short docs lint environment

demo: $(INSTALLED)
	$(BIN)/lightning-rl train examples/calculator/lightning.yaml --require-improvement $(ARGS)

demo-sql: $(INSTALLED)
	$(BIN)/lightning-rl train examples/text_to_sql/lightning.yaml --require-improvement $(ARGS)

test: $(INSTALLED)
	$(ONE_THREAD) $(BIN)/python -m pytest $(THRICE) -m "not long" $(ARGS)

test-long: $(INSTALLED)
	$(ONE_THREAD) $(BIN)/python -m pytest $(THRICE) -m long $(ARGS)

# Random requests to the policy endpoint, in all wire formats.
FUZZ := 1000000
fuzz: $(INSTALLED)
	$(ONE_THREAD) $(BIN)/python -m tests.bench.fuzz --requests $(FUZZ) $(ARGS)

# Training runs that are killed at random points, resumed, and compared with undisturbed ones; then a table of faults.
KILLS := 100
FAULTS := --faults
chaos: $(INSTALLED)
	$(ONE_THREAD) $(BIN)/python -m tests.bench.chaos --kills $(KILLS) $(FAULTS) $(ARGS)

# The tests that compare numbers, once more with the kernels of a CPU that has AVX2 and nothing newer: those of kernels, losses and
# gradients. The long form has exported models and supervised fine-tuning too.
test-numeric: $(INSTALLED)
	$(AVX2) $(ONE_THREAD) $(BIN)/python -m pytest $(TWICE) -m "numeric and not slow" $(NUMERIC) $(ARGS)

test-numeric-long: $(INSTALLED)
	$(AVX2) $(ONE_THREAD) $(BIN)/python -m pytest $(TWICE) -m numeric $(ARGS)

# How far each family of models is from transformers alone: path, sampled logprobs, gradient, export.
models: $(INSTALLED)
	$(BIN)/python -m docs._generate.models --measure

# Fast tests, without torch, on the newest CPython up to 3.14 that this machine has.
test-pythons:
	$(PYTHON) .ci/pythons.py $(ARGS)

# All fast tests, on each one from 3.12.
test-pythons-long:
	$(PYTHON) .ci/pythons.py --all $(ARGS)

# The integrations with the lowest versions of the frameworks that their extras allow: the contract suite and the tests of each one. The
# long form has all tests with these frameworks.
test-lowest: $(LOWEST)/.installed
	$(ONE_THREAD) $(LOWEST)/bin/python -m pytest $(TWICE) -m "not slow" $(EACH_INTEGRATION) $(ARGS)

test-lowest-long: $(LOWEST)/.installed
	$(ONE_THREAD) $(LOWEST)/bin/python -m pytest $(TWICE) -m "not slow" tests/integrations $(ARGS)

# Agents of other frameworks. Two environments, since these frameworks cannot all be installed into one.
test-frameworks: $(FRAMEWORKS)/first/.installed $(FRAMEWORKS)/second/.installed
	$(FRAMEWORKS)/first/bin/python -m pytest tests/frameworks/first $(ARGS)
	$(FRAMEWORKS)/second/bin/python -m pytest tests/frameworks/second $(ARGS)

# Experiment trackers with their own packages, offline. An environment of its own, since they replace what ours pins, and bring
# another event loop and HTTP parser for uvicorn.
test-trackers: $(TRACKERS)/.installed
	$(TRACKERS)/bin/python -m pytest tests/trackers $(ARGS)

# Agents beside Sentry, Langfuse, Datadog's and other instrumentations, which are initialized before or after Lightning's patches. An
# environment of its own, since they bring nearly a hundred instrumentations. The long form has worker processes too.
test-coexistence: $(COEXISTENCE)/.installed
	$(ONE_THREAD) $(COEXISTENCE)/bin/python -m pytest -m "not long" tests/coexistence $(ARGS)

test-coexistence-long: $(COEXISTENCE)/.installed
	$(ONE_THREAD) $(COEXISTENCE)/bin/python -m pytest tests/coexistence $(ARGS)

# The policy backend on a real vLLM server, in vLLM's build for CPUs. The long form starts more servers.
test-vllm: $(CLUSTER)/.installed
	$(CLUSTER)/bin/python -m pytest -m "not long" tests/vllm $(ARGS)

test-vllm-long: $(CLUSTER)/.installed
	$(CLUSTER)/bin/python -m pytest tests/vllm $(ARGS)

# Training with verl itself, on Ray and vLLM's build for CPUs. Only the long form runs verl's asynchronous trainers, `eval`, and all
# pairs of losses and settings.
test-verl: $(CLUSTER)/.installed
	$(CLUSTER)/bin/python -m pytest $(TWICE) -m "not slow" tests/verl $(ARGS)

test-verl-long: $(CLUSTER)/.installed
	$(CLUSTER)/bin/python -m pytest $(TWICE) tests/verl $(ARGS)

# Losses against verl's and TRL's own functions.
test-parity: $(CLUSTER)/.installed
	$(CLUSTER)/bin/python -m pytest tests/parity $(ARGS)

# Agents in containers, with Podman and an image made by debootstrap.
test-containers: $(INSTALLED)
	$(BIN)/python -m pytest tests/containers $(ARGS)

# The viewer in a real Chromium. VIEW_SCREENSHOTS=folder keeps the screenshots.
test-view: $(VENV)/.installed-view
	$(BIN)/python -m pytest tests/browser $(ARGS)

# The installation page and the quickstart, with this checkout's wheel in a fresh environment. Only the long form trains for as many
# steps as they do.
test-first-hour: $(INSTALLED)
	$(BIN)/python -m pytest -m "not long" tests/first_hour $(ARGS)

test-first-hour-long: $(INSTALLED)
	$(BIN)/python -m pytest tests/first_hour $(ARGS)

# Unmodified agents: programs, which are installed from the npm registry into .agents when their tests run first, and Python packages.
agents: $(INSTALLED) $(FRAMEWORKS)/first/.installed $(FRAMEWORKS)/second/.installed
	$(BIN)/python -m pytest tests/agents $(ARGS)

# Two of them, without the training steps.
agents-short: $(INSTALLED)
	$(BIN)/python -m pytest tests/agents/test_codex.py tests/agents/test_claude_code.py -m "not slow" $(ARGS)

# The documentation site, in build/site. A broken link or a page outside the navigation is an error.
docs: $(DOCS)/.installed
	NO_MKDOCS_2_WARNING=1 $(DOCS)/bin/mkdocs build --strict $(ARGS)

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright --pythonpath $(BIN)/python
	$(BIN)/lint-imports

environment: $(INSTALLED)

$(INSTALLED): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "$(PYTHON) is older than Python 3.11: set PYTHON=/path/to/one" >&2; exit 2; }
	$(PYTHON) -m venv $(VENV)
	$(PIP) $(INSTALL) -c constraints.txt "$(TORCH)" uv
	$(BIN)/$(UV) --python $(BIN)/python -c constraints.txt -e '.[all,dev,dev-models]'
	$(BIN)/$(UV) --python $(BIN)/python --no-deps $(TEMPLATES) $(BFCL)
	touch $(INSTALLED)

$(VENV)/.installed-view: $(INSTALLED)
	$(BIN)/$(UV) --python $(BIN)/python -c constraints.txt -e '.[dev-view]'
	touch $@

$(LOWEST)/.installed: pyproject.toml constraints.txt .ci/lowest.py
	$(PYTHON) -m venv $(LOWEST)
	$(PYTHON) .ci/lowest.py constraints > $(LOWEST)/constraints.txt
	$(LOWEST)/bin/python -m pip --disable-pip-version-check --no-input install -q uv
	$(LOWEST)/bin/$(UV) --python $(LOWEST)/bin/python -c $(LOWEST)/constraints.txt \
		-e ".[$$($(PYTHON) .ci/lowest.py extras),dev]"
	touch $(LOWEST)/.installed

$(FRAMEWORKS)/%/.installed: pyproject.toml tests/frameworks/%/requirements.txt
	$(PYTHON) -m venv $(FRAMEWORKS)/$*
	$(FRAMEWORKS)/$*/bin/python -m pip --disable-pip-version-check --no-input install -q uv
	$(FRAMEWORKS)/$*/bin/$(UV) --python $(FRAMEWORKS)/$*/bin/python -r tests/frameworks/$*/requirements.txt
	$(FRAMEWORKS)/$*/bin/$(UV) --python $(FRAMEWORKS)/$*/bin/python --no-deps -e .
	touch $(FRAMEWORKS)/$*/.installed

$(TRACKERS)/.installed: pyproject.toml tests/trackers/requirements.txt
	$(PYTHON) -m venv $(TRACKERS)
	$(TRACKERS)/bin/python -m pip --disable-pip-version-check --no-input install -q uv
	$(TRACKERS)/bin/$(UV) --python $(TRACKERS)/bin/python -r tests/trackers/requirements.txt
	$(TRACKERS)/bin/$(UV) --python $(TRACKERS)/bin/python --no-deps -e .
	touch $(TRACKERS)/.installed

# With --no-deps: one of them requires an older openai than another, see overrides.txt.
$(COEXISTENCE)/.installed: pyproject.toml tests/coexistence/requirements.txt
	$(PYTHON) -m venv $(COEXISTENCE)
	$(COEXISTENCE)/bin/python -m pip --disable-pip-version-check --no-input install -q uv
	$(COEXISTENCE)/bin/$(UV) --python $(COEXISTENCE)/bin/python --no-deps -r tests/coexistence/requirements.txt -e .
	touch $(COEXISTENCE)/.installed

# The packages of the extra alone: the site reads the source without importing it.
$(DOCS)/.installed: pyproject.toml
	$(PYTHON) -m venv $(DOCS)
	$(DOCS)/bin/python -m pip --disable-pip-version-check --no-input install -q \
		$$($(PYTHON) -c 'import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["docs"])')
	touch $(DOCS)/.installed

# An environment of its own, since verl admits no transformers as new as ours.
$(CLUSTER)/.installed: pyproject.toml tests/cluster/lock.txt tests/cluster/alias/pyproject.toml
	$(PYTHON) -m venv $(CLUSTER)
	$(CLUSTER)/bin/python -m pip --disable-pip-version-check --no-input $(INSTALL) --no-deps -r tests/cluster/lock.txt
	$(CLUSTER)/bin/python -m pip --disable-pip-version-check --no-input $(INSTALL) --no-deps ./tests/cluster/alias -e .
	touch $(CLUSTER)/.installed
