# Thin: each target calls the command `rosetta`, in the harness's own environment.
#
#   make benchmark                                  the whole table
#   make benchmark FRAMEWORKS=torch,mxnet PROFILE=smoke REPEATS=2 DEVICE=cpu
#   make benchmark THREADS=1,2 BATCH_SIZES=1,64     how it goes with threads and batch size
#   make compare A=results/runs/one B=results/latest    two results held against each other
#   make verify MODES=all                           the proof of identity alone, nothing timed
#   make test                                       all checks and tests
#   make lab                                        the notebooks in JupyterLab, each on its own kernel

PROFILE    ?=
WORKLOADS  ?=
FRAMEWORKS ?=
MODES      ?=
REPEATS    ?=
THREADS    ?=
BATCH_SIZES ?=
A          ?=
B          ?= results/latest
DEVICE     ?=
# Options for pip, for example PIP_ARGS="--index-url https://example.org/simple"
PIP_ARGS   ?=
# The harness's Python: the first of these that runs and is 3.11 or later.
PYTHON     ?= $(firstword $(foreach python,python3.11 python3.12 python3.13 python3.14 python3,$(shell $(python) -c \
	'import sys; print("$(python)" if sys.version_info >= (3, 11) else "")' 2>/dev/null)))

ROSETTA := .venv/bin/rosetta
READY   := .venv/ready

.PHONY: benchmark verify test report compare reference lab clean

benchmark: $(READY)
	@$(ROSETTA) run $(if $(WORKLOADS),--workload $(WORKLOADS)) $(if $(FRAMEWORKS),--framework $(FRAMEWORKS)) \
		$(if $(MODES),--mode $(MODES)) $(if $(PROFILE),--profile $(PROFILE)) $(if $(REPEATS),--repeats $(REPEATS)) \
		$(if $(THREADS),--threads $(THREADS)) $(if $(BATCH_SIZES),--batch-size $(BATCH_SIZES)) \
		$(if $(DEVICE),--device $(DEVICE)) $(if $(PIP_ARGS),--pip "$(PIP_ARGS)")

verify: $(READY)
	@$(ROSETTA) verify $(if $(WORKLOADS),--workload $(WORKLOADS)) $(if $(FRAMEWORKS),--framework $(FRAMEWORKS)) \
		$(if $(MODES),--mode $(MODES)) $(if $(DEVICE),--device $(DEVICE)) $(if $(PIP_ARGS),--pip "$(PIP_ARGS)")

test: $(READY)
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/mypy
	@$(ROSETTA) environments build --device cpu $(if $(PIP_ARGS),--pip "$(PIP_ARGS)")
	.venv/bin/pytest

report: $(READY)
	@$(ROSETTA) report

compare: $(READY)
	@test -n "$(A)" || { echo "make: say what to compare: make compare A=results/runs/one B=results/runs/other"; exit 2; }
	@$(ROSETTA) compare "$(A)" "$(B)"

reference: $(READY)
	@$(ROSETTA) reference

lab: $(READY)
	@$(ROSETTA) lab

clean:
	rm -rf .venv environments .pytest_cache .ruff_cache .mypy_cache

# The mark is made last: an environment that was left half-built is built anew.
$(READY): requirements.lock pyproject.toml
	@test -n "$(PYTHON)" || { echo "make: no Python 3.11 or later on PATH; install one or say make PYTHON=/path/to/python3.11"; exit 2; }
	@echo "building the harness's environment with $(PYTHON)"
	@rm -rf .venv
	@$(PYTHON) -m venv .venv
	@.venv/bin/python -m pip install --quiet $(PIP_ARGS) --requirement requirements.lock
	@.venv/bin/python -m pip install --quiet --no-deps --editable .
	@touch $@
