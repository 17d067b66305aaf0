# The commands of the template. On a fresh machine with Python 3.11 to 3.13, git and make: make demo, or make test.
PYTHON ?= python3
VENV ?= .venv
ARGS ?=

RUN = "$(VENV)/bin/python" -m
# Torch and all, for the demo and the tests alike. It is installed once.
PROJECT_VENV = $(CURDIR)/build/env
PYTHON_FILES = local_extensions.py hooks tests
COMPILE = "$(VENV)/bin/uv" pip compile --quiet --universal --python-version 3.11 --generate-hashes --no-annotate --no-header \
	--no-emit-index-url $(if $(UPGRADE),--upgrade)

.PHONY: help setup demo test lint format lock clean

help: ## Show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-7s %s\n", $$1, $$2 }' Makefile

setup: ## Make .venv with what requirements.lock says; the others do this by themselves
	@"$(PYTHON)" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' 2>/dev/null || { \
		echo "Python 3.11, 3.12 or 3.13 is needed; '$(PYTHON)' is $$("$(PYTHON)" -V 2>/dev/null || echo not there). Name another: make $(or $(MAKECMDGOALS),setup) PYTHON=python3.12" >&2; exit 1; }
	@stamp="$$(cksum <requirements.lock) $(CURDIR)"; \
	if [ "$$(cat "$(VENV)/.stamp" 2>/dev/null)" != "$$stamp" ]; then \
		echo "Making $(VENV) ..." && \
		"$(PYTHON)" -m venv --clear "$(VENV)" && \
		$(RUN) pip --disable-pip-version-check install --quiet --no-deps --require-hashes -r requirements.lock && \
		echo "$$stamp" >"$(VENV)/.stamp"; \
	fi

demo: setup ## Generate the default project into build/ and train it for real
	@mkdir -p build
	@$(RUN) cookiecutter . --default-config --no-input --overwrite-if-exists --output-dir build
	@$(MAKE) --no-print-directory -C build/my-experiment train PYTHON="$(abspath $(VENV))/bin/python" VENV="$(PROJECT_VENV)" ARGS="$(ARGS)"
	@$(RUN) tests.show_result build/my-experiment

test: setup ## Run all tests, generated projects included; only quick ones: make test ARGS="-m 'not project'"
	@$(RUN) pytest $(ARGS)

lint: setup ## Check style and types
	@$(RUN) ruff check $(PYTHON_FILES)
	@$(RUN) ruff format --check $(PYTHON_FILES)
	@$(RUN) mypy

format: setup ## Mend style and layout
	@$(RUN) ruff check --fix $(PYTHON_FILES)
	@$(RUN) ruff format $(PYTHON_FILES)

lock: setup ## Renew the locks after a change in requirements.in or tests/extras.in; to newer versions: make lock UPGRADE=1
	@$(COMPILE) requirements.in -o requirements.lock
	@$(COMPILE) tests/extras.in -o tests/extras.lock

clean: ## Remove build/, .venv/ and caches
	@rm -rf build "$(VENV)" .mypy_cache .pytest_cache .ruff_cache
	@find hooks tests . -maxdepth 1 -name __pycache__ -type d -prune -exec rm -rf {} +
