# Muster's commands; `make` alone lists them. They need bash, make, git and Python 3.11 or newer.
#
# make itself exits 0 or 2: for a run's own exit code call `.venv/bin/python -m flows.train SPEC`.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.ONESHELL:
.DEFAULT_GOAL := help
MAKEFLAGS += --no-builtin-rules

PYTHON ?= python3
VENV := .venv
PY := $(VENV)/bin/python
# What most processes import, that it is compiled before the first does.
IMPORTED := import deployments.stack.command, deployments.worker, flows.pipeline, prefect.cli.deployment, \
	prefect.cli.server, prefect.cli.worker, prefect.server.api.server, ray.dashboard.agent, \
	ray.dashboard.dashboard, ray.scripts.scripts
SPEC ?= deployments/runs/quickstart.yaml
# Tests that attack Muster as another user of the machine.
ATTACKS := $(shell grep -rlE 'support.(another_user|attack_programs|shared_places) import' \
	--include='test_*.py' tests) tests/integration/test_another_user.py
# Of the quickstart with vLLM, whose packages can't stand beside Muster's own.
LLM_VENV := .venv-llm
LLM := deployments/quickstart-llm

# No program started from here reports to anybody or downloads a model.
export DO_NOT_TRACK := 1
export PREFECT_SERVER_ANALYTICS_ENABLED := false
export RAY_USAGE_STATS_ENABLED := 0
export HF_HUB_OFFLINE := 1

.PHONY: help install train llm llm-faults test thorough faults attacks soak stack-kills by-hand ray-kills pipeline-kills gang-storm fleet-chaos gpu-check mutants up down prune bench verl-check backends-check house docs site ui-test screenshots constraints

# What drives a browser; the browser itself is the system's (apt-get install chromium).
define with-browser
if ! $(PY) -c 'import playwright, PIL' 2>/dev/null; then
	$(PY) -m pip install -qq --disable-pip-version-check --no-input -c constraints.txt -e '.[ui]'
fi
endef

help:  ## list the commands
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-14s %s\n", $$1, $$2 }' Makefile

install:  ## install into .venv what is needed, unless that is done
	@# .installed holds what the venv was made from; .installing stands while one is half made. Both
	# are looked at under a lock, so that of two makes the second finds the work done.
	exec 9<Makefile
	if ! flock -n 9; then
		echo "Another make is installing into $(VENV): waiting for it." >&2
		flock -w 1800 9 || { echo "It has not finished within 30 minutes: end it, then try again." >&2; exit 1; }
	fi
	place="$$(pwd -P)"
	wanted="$$(cat pyproject.toml constraints.txt | sha256sum) $$place"
	made="$$(cat $(VENV)/.installed 2>/dev/null || true)"
	if [ "$$made" = "$$wanted" ] && [ ! -e $(VENV)/.installing ] && $(PY) -c '' 2>/dev/null; then
		exit 0
	fi
	# The scripts in a venv name the place where it was made: a checkout that was moved needs a new one.
	again="$$(ls $(VENV)/.installing 2>/dev/null || true)"
	[ -z "$$made" ] || [ "$${made#*- }" = "$$place" ] || again=moved
	if [ -n "$$again" ] || ! $(PY) -m pip --version >/dev/null 2>&1; then
		if ! found="$$($(PYTHON) --version 2>&1)"; then
			echo "There is no '$(PYTHON)' here. Muster needs Python 3.11 or newer: on Debian and Ubuntu, apt-get install python3 python3-venv; one of another name is taken with 'make install PYTHON=python3.12'." >&2
			exit 1
		fi
		if ! $(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then
			echo "'$(PYTHON)' is $$found. Muster needs Python 3.11 or newer: one of another name is taken with 'make install PYTHON=python3.12'." >&2
			exit 1
		fi
		if ! $(PYTHON) -c 'import ensurepip, venv' 2>/dev/null; then
			echo "'$(PYTHON)' ($$found) comes without venv and ensurepip: on Debian and Ubuntu, apt-get install python3-venv." >&2
			exit 1
		fi
		echo "Installing into $(VENV): a couple of minutes." >&2
		$(PYTHON) -m venv --clear $(VENV)
	else
		echo "Installing into $(VENV) what has changed: up to a couple of minutes." >&2
	fi
	stopped=
	trap 'stopped=1' INT TERM
	touch $(VENV)/.installing
	if $(PY) -m pip install -qq --no-compile --disable-pip-version-check --no-input -c constraints.txt -e '.[quickstart,dev]' 9<&-; then
		# Only what is imported: all of it would take a minute. Not left to the first import, which may
		# be forbidden to write: each process would then take seconds longer.
		env -u PYTHONDONTWRITEBYTECODE $(PY) -c '$(IMPORTED)'
		echo "$$wanted" >$(VENV)/.installed
		rm $(VENV)/.installing
	else
		# pip takes back what it did when it fails, but not when it is interrupted.
		[ -n "$$stopped" ] || rm $(VENV)/.installing
		echo "The installation failed; pip says above why. 'make install' tries again." >&2
		exit 1
	fi

train: install  ## run the quickstart here [SPEC=file.yaml] [ARGS='--set a.b=c']
	@exec $(PY) -m flows.train $(SPEC) $(ARGS)

llm: install  ## GRPO on two real vLLM servers, on the CPU [ARGS='--set progress.total=80']
	@$(LLM)/install.sh $(LLM_VENV) $(PY)
	PATH="$$PWD/$(LLM_VENV)/bin:$$PATH" exec $(PY) -m flows.train $(LLM)/quickstart-llm.yaml $(ARGS)

llm-faults: install  ## the same with engines killed, stopped and given broken weights [ARGS='--log FILE']
	@$(LLM)/install.sh $(LLM_VENV) $(PY)
	exec $(PY) -m tests.faults.llm $(ARGS)

test: install  ## lint, types and tests [ARGS='-k name']
	@$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	# Beside the unit tests: alone it would leave all cores but one idle for a minute.
	$(PY) -m mypy & types=$$!
	trap '[ -z "$$types" ] || kill $$types 2>/dev/null || true' EXIT
	$(if $(findstring tests/,$(ARGS)),wait $$types && exec $(PY) -m pytest $(ARGS))
	# pytest exits 5 where it finds no test, as one of the parts may with `-k name`.
	exited=5
	for part in "tests/unit -n 2" "tests --ignore=tests/unit -n 2 --dist loadgroup --no-loadscope-reorder"; do
		code=0
		$(PY) -m pytest $$part $(ARGS) || code=$$?
		[ $$code -le 1 ] || [ $$code = 5 ] || exit $$code
		[ $$code = 5 ] || [ $$exited = 1 ] || exited=$$code
		[ -z "$$types" ] || wait $$types || { echo "mypy has found faults: they stand above, among the unit tests." >&2; exit 1; }
		types=
	done
	exit $$exited

thorough: install  ## the tests that `make test` leaves out for their length [ARGS='-k name']
	@exec $(PY) -m pytest -m thorough $(ARGS)

faults: install  ## attacks, the whole fault matrix, and Prefect's own failures [ARGS='-k name': of the matrix]
	@$(if $(ARGS),,$(MAKE) --no-print-directory attacks)
	exec $(PY) -m pytest tests/faults $(ARGS)

attacks: install  ## attacks by another user of the machine; needs root [ARGS='-k name']
	@if [ "$$(id -u)" != 0 ]; then
		echo "Only root can start programs as another user: run 'sudo make attacks'." >&2
		exit 1
	fi
	MUSTER_REQUIRE_ATTACKS=1 exec $(PY) -m pytest -m "" $(ATTACKS) $(ARGS)

soak: install  ## many runs, killed at random [ARGS='--runs 200 --seed 1']
	@exec $(PY) -m tests.faults.soak $(ARGS)

stack-kills: install  ## each part of a stack killed at random under trainings [MUSTER_SEED=1 MUSTER_KILLS=5]
	@exec $(PY) -m pytest -s tests/faults/test_stack_parts.py $(ARGS)

by-hand: install  ## each change that a person can make to runs [MUSTER_SEED=1 MUSTER_DATABASE=postgresql]
	@exec $(PY) -m pytest tests/faults/test_by_hand_matrix.py $(ARGS)

ray-kills: install  ## flow processes of Ray jobs, killed at random [ARGS='--runs 20 --seed 1']
	@exec $(PY) -m tests.faults.ray_kills $(ARGS)

pipeline-kills: install  ## the programs around a pipeline, killed at random [ARGS='--kills 10 --seed 1']
	@exec $(PY) -m tests.faults.pipeline_kills $(ARGS)

gang-storm: install  ## the gang queue under kills, cancels and requeues [ARGS='--runs 100 --only NAME']
	@exec $(PY) -m tests.faults.gang_storm $(ARGS)

fleet-chaos: install  ## a rollout fleet under faults drawn at random [ARGS='--minutes 10 --seed 1']
	@exec $(PY) -m tests.faults.fleet_chaos $(ARGS)

gpu-check: install  ## what only a real GPU can show; without one it says so
	@exec $(PY) -m tests.gpu_check

mutants: install  ## small faults in the code, and which the unit tests notice [ARGS='--seed 1']
	@if ! $(PY) -c 'import cosmic_ray, coverage' 2>/dev/null; then
		$(PY) -m pip install -qq --disable-pip-version-check --no-input -c constraints.txt -e '.[mutants]'
	fi
	exec $(PY) -m tests.mutants $(ARGS)

up: install  ## start the lasting stack: Prefect, Ray, pool, worker, deployments [PORT=n] [GPUS=2x8]
	@exec $(VENV)/bin/muster up $(if $(PORT),--port $(PORT)) $(if $(GPUS),--gpus $(GPUS))

down:  ## stop all of the lasting stack [PORT=n]
	@if [ ! -x $(PY) ]; then
		echo "Nothing is installed in $(VENV), so no stack was started from here." >&2
		exit 0
	fi
	exec $(VENV)/bin/muster down $(if $(PORT),--port $(PORT))

prune: install  ## what may go of what ended runs have left here [ARGS=--yes]
	@exec $(VENV)/bin/muster prune $(ARGS)

bench: install  ## measure Muster against other ways, into BENCHMARKS.md [ARGS='crash --quick']
	@if ! $(PY) -c 'import circus, honcho, pandas, pyarrow, supervisor, tensorboardX' 2>/dev/null; then
		$(PY) -m pip install -qq --disable-pip-version-check --no-input -c constraints.txt -e '.[bench]'
	fi
	exec $(PY) -m tests.benchmarks $(ARGS)

verl-check: install  ## hold the run specs for verl against verl itself [ARGS='--write SPEC.yaml']
	@exec $(PY) -m tests.peers.verl.check --wheel $(ARGS)

backends-check: install  ## hold a fleet's servers against the backends' own packages [ARGS='--write']
	@exec $(PY) -m tests.peers.backends.check --packages $(ARGS)

house: install  ## figures of the code: folders, modules, lines, the longest chain of imports
	@$(PY) -m tests.support.house
	exec $(PY) -m tests.support.module_paths

docs: install  ## write the parts of docs/ that are made from the code [ARGS=--check]
	@exec $(PY) -m tests.documents $(ARGS)

site: install  ## build the documents as a web site in build/site, with its links checked
	@if ! $(PY) -c 'import material, mkdocs' 2>/dev/null; then
		$(PY) -m pip install -qq --disable-pip-version-check --no-input -c constraints.txt -e '.[docs]'
	fi
	exec $(PY) -m tests.documents.site $(ARGS)

ui-test: install  ## the Prefect UI in a real browser, on a stack of its own [ARGS='-k form']
	@$(call with-browser)
	exec $(PY) -m pytest tests/ui $(ARGS)

screenshots: install  ## make the pictures of docs/images anew
	@$(call with-browser)
	exec $(PY) -m tests.ui.screenshots $(ARGS)

constraints:  ## write constraints.txt anew from what the ranges of pyproject.toml resolve to
	@scratch="$$(mktemp -d)"
	trap 'rm -rf "$$scratch"' EXIT
	$(PYTHON) -m venv "$$scratch"
	"$$scratch/bin/python" -m pip install -q --disable-pip-version-check --no-input '.[quickstart,s3,gcs,dev,bench,mutants,ui,docs]'
	"$$scratch/bin/python" -m pip freeze --exclude muster >"$$scratch/frozen"
	if grep -vE '^[A-Za-z0-9._-]+==[^ @;]+$$' "$$scratch/frozen"; then
		echo "These came from somewhere else than a package index; constraints.txt is left as it was." >&2
		exit 1
	fi
	{ sed -n '/^#/p' constraints.txt; LC_ALL=C sort -f "$$scratch/frozen"; } >"$$scratch/constraints.txt"
	cp "$$scratch/constraints.txt" constraints.txt
