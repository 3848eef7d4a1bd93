# Muster's commands; `make` alone lists them. They need bash, make, git and Python 3.11 or newer.
#
# make itself exits with 0 or 2. For the exit code of a run, use `.venv/bin/python -m flows.train SPEC`.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.ONESHELL:
.DEFAULT_GOAL := help
MAKEFLAGS += --no-builtin-rules

PYTHON ?= python3
VENV := .venv
PY := $(VENV)/bin/python
# Modules that most processes import. The installation compiles them.
IMPORTED := import deployments.stack.command, deployments.worker, flows.pipeline, prefect.cli.deployment, \
	prefect.cli.server, prefect.cli.worker, prefect.server.api.server, ray.dashboard.agent, \
	ray.dashboard.dashboard, ray.scripts.scripts
SPEC ?= deployments/runs/quickstart.yaml
# Tests that attack Muster as another user of the machine.
ATTACKS := $(shell grep -rlE 'support.(another_user|attack_programs|shared_places) import' \
	--include='test_*.py' tests) tests/integration/test_another_user.py
# Virtual environment of the quickstart with vLLM. Its packages conflict with Muster's own.
LLM_VENV := .venv-llm
LLM := deployments/quickstart-llm

# Programs started from here send no usage statistics and download no models.
export DO_NOT_TRACK := 1
export PREFECT_SERVER_ANALYTICS_ENABLED := false
export RAY_USAGE_STATS_ENABLED := 0
export HF_HUB_OFFLINE := 1

.PHONY: help install train llm llm-faults test thorough faults attacks soak stack-kills by-hand ray-kills pipeline-kills gang-storm fleet-chaos gpu-check mutants up down prune bench verl-check backends-check house docs site ui-test screenshots constraints

# Install the packages that drive a browser. The browser is Debian's (apt-get install chromium).
define with-browser
if ! $(PY) -c 'import playwright, PIL' 2>/dev/null; then
	$(PY) -m pip install -qq --disable-pip-version-check --no-input -c constraints.txt -e '.[ui]'
fi
endef

help:  ## list the commands
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-14s %s\n", $$1, $$2 }' Makefile

install:  ## install the dependencies into .venv, unless they are installed
	@# .installed contains a hash of the files that the venv was made from. .installing exists during
	# an installation. A lock protects both: of two concurrent makes, the second one has nothing to do.
	exec 9<Makefile
	if ! flock -n 9; then
		echo "Another make is installing into $(VENV). This one waits for it." >&2
		flock -w 1800 9 || { echo "The other installation has not finished within 30 minutes. End it, then try again." >&2; exit 1; }
	fi
	place="$$(pwd -P)"
	wanted="$$(cat pyproject.toml constraints.txt | sha256sum) $$place"
	made="$$(cat $(VENV)/.installed 2>/dev/null || true)"
	if [ "$$made" = "$$wanted" ] && [ ! -e $(VENV)/.installing ] && $(PY) -c '' 2>/dev/null; then
		exit 0
	fi
	# The scripts in a venv contain its path, so a checkout that was moved needs a new venv.
	again="$$(ls $(VENV)/.installing 2>/dev/null || true)"
	[ -z "$$made" ] || [ "$${made#*- }" = "$$place" ] || again=moved
	if [ -n "$$again" ] || ! $(PY) -m pip --version >/dev/null 2>&1; then
		if ! found="$$($(PYTHON) --version 2>&1)"; then
			echo "The command '$(PYTHON)' was not found. Muster needs Python 3.11 or newer. On Debian and Ubuntu, install it with 'apt-get install python3 python3-venv'. To use a Python with another name, run 'make install PYTHON=python3.12'." >&2
			exit 1
		fi
		if ! $(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then
			echo "'$(PYTHON)' is $$found. Muster needs Python 3.11 or newer. To use a Python with another name, run 'make install PYTHON=python3.12'." >&2
			exit 1
		fi
		if ! $(PYTHON) -c 'import ensurepip, venv' 2>/dev/null; then
			echo "'$(PYTHON)' ($$found) has no modules venv and ensurepip. On Debian and Ubuntu, install them with 'apt-get install python3-venv'." >&2
			exit 1
		fi
		echo "Installing into $(VENV). This takes a few minutes." >&2
		$(PYTHON) -m venv --clear $(VENV)
	else
		echo "Installing the changed dependencies into $(VENV). This takes up to a few minutes." >&2
	fi
	stopped=
	trap 'stopped=1' INT TERM
	touch $(VENV)/.installing
	if $(PY) -m pip install -qq --no-compile --disable-pip-version-check --no-input -c constraints.txt -e '.[quickstart,dev]' 9<&-; then
		# Compile only the modules that are imported, because all modules would take a minute. A later
		# import may have no permission to write compiled files, and would take seconds in each process.
		env -u PYTHONDONTWRITEBYTECODE $(PY) -c '$(IMPORTED)'
		echo "$$wanted" >$(VENV)/.installed
		rm $(VENV)/.installing
	else
		# A failed pip removes its changes. An interrupted pip does not.
		[ -n "$$stopped" ] || rm $(VENV)/.installing
		echo "The installation failed, see the output of pip above. To try again, run 'make install'." >&2
		exit 1
	fi

train: install  ## run the quickstart here [SPEC=file.yaml] [ARGS='--set a.b=c']
	@exec $(PY) -m flows.train $(SPEC) $(ARGS)

llm: install  ## GRPO on two real vLLM servers, on the CPU [ARGS='--set progress.total=80']
	@$(LLM)/install.sh $(LLM_VENV) $(PY)
	PATH="$$PWD/$(LLM_VENV)/bin:$$PATH" exec $(PY) -m flows.train $(LLM)/quickstart-llm.yaml $(ARGS)

llm-faults: install  ## the same, with killed engines, stopped engines and broken weights [ARGS='--log FILE']
	@$(LLM)/install.sh $(LLM_VENV) $(PY)
	exec $(PY) -m tests.faults.llm $(ARGS)

test: install  ## lint, types and tests [ARGS='-k name']
	@$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	# mypy uses one core for a minute, so it runs at the same time as the unit tests.
	$(PY) -m mypy & types=$$!
	trap '[ -z "$$types" ] || kill $$types 2>/dev/null || true' EXIT
	$(if $(findstring tests/,$(ARGS)),wait $$types && exec $(PY) -m pytest $(ARGS))
	# pytest exits with 5 if it finds no test, which can happen in one part with `-k name`.
	exited=5
	for part in "tests/unit -n 2" "tests --ignore=tests/unit -n 2 --dist loadgroup --no-loadscope-reorder"; do
		code=0
		$(PY) -m pytest $$part $(ARGS) || code=$$?
		[ $$code -le 1 ] || [ $$code = 5 ] || exit $$code
		[ $$code = 5 ] || [ $$exited = 1 ] || exited=$$code
		[ -z "$$types" ] || wait $$types || { echo "mypy found errors. They are in the output above, among the unit tests." >&2; exit 1; }
		types=
	done
	exit $$exited

thorough: install  ## the long tests that `make test` omits [ARGS='-k name']
	@exec $(PY) -m pytest -m thorough $(ARGS)

faults: install  ## attacks, the whole fault matrix, and Prefect's failures [ARGS='-k row']
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

gpu-check: install  ## checks that need a real GPU
	@exec $(PY) -m tests.gpu_check

mutants: install  ## put small faults into the code and count those that the unit tests find [ARGS='--seed 1']
	@if ! $(PY) -c 'import cosmic_ray, coverage' 2>/dev/null; then
		$(PY) -m pip install -qq --disable-pip-version-check --no-input -c constraints.txt -e '.[mutants]'
	fi
	exec $(PY) -m tests.mutants $(ARGS)

up: install  ## start the lasting stack: Prefect, Ray, pool, worker, deployments [PORT=n] [GPUS=2x8]
	@exec $(VENV)/bin/muster up $(if $(PORT),--port $(PORT)) $(if $(GPUS),--gpus $(GPUS))

down:  ## stop all of the lasting stack [PORT=n]
	@if [ ! -x $(PY) ]; then
		echo "Nothing is installed in $(VENV), so there is no stack of this checkout to stop." >&2
		exit 0
	fi
	exec $(VENV)/bin/muster down $(if $(PORT),--port $(PORT))

prune: install  ## list old files of ended runs, and delete them with ARGS=--yes
	@exec $(VENV)/bin/muster prune $(ARGS)

bench: install  ## compare Muster's speed with other tools, for BENCHMARKS.md [ARGS='crash --quick']
	@if ! $(PY) -c 'import circus, honcho, pandas, pyarrow, supervisor, tensorboardX' 2>/dev/null; then
		$(PY) -m pip install -qq --disable-pip-version-check --no-input -c constraints.txt -e '.[bench]'
	fi
	exec $(PY) -m tests.benchmarks $(ARGS)

verl-check: install  ## check the run specs for verl with verl itself [ARGS='--write SPEC.yaml']
	@exec $(PY) -m tests.peers.verl.check --wheel $(ARGS)

backends-check: install  ## compare a fleet's servers with the packages of the backends [ARGS='--write']
	@exec $(PY) -m tests.peers.backends.check --packages $(ARGS)

house: install  ## print figures of the code: folders, modules, lines, the longest chain of imports
	@$(PY) -m tests.support.house
	exec $(PY) -m tests.support.module_paths

docs: install  ## write the parts of docs/ that are generated from the code [ARGS=--check]
	@exec $(PY) -m tests.documents $(ARGS)

site: install  ## build the documents as a web site in build/site and check its links
	@if ! $(PY) -c 'import material, mkdocs' 2>/dev/null; then
		$(PY) -m pip install -qq --disable-pip-version-check --no-input -c constraints.txt -e '.[docs]'
	fi
	exec $(PY) -m tests.documents.site $(ARGS)

ui-test: install  ## the Prefect UI in a real browser, on a stack of its own [ARGS='-k form']
	@$(call with-browser)
	exec $(PY) -m pytest tests/ui $(ARGS)

screenshots: install  ## make new pictures for docs/images
	@$(call with-browser)
	exec $(PY) -m tests.ui.screenshots $(ARGS)

constraints:  ## write constraints.txt with the versions that pip selects for pyproject.toml
	@scratch="$$(mktemp -d)"
	trap 'rm -rf "$$scratch"' EXIT
	$(PYTHON) -m venv "$$scratch"
	"$$scratch/bin/python" -m pip install -q --disable-pip-version-check --no-input '.[quickstart,s3,gcs,dev,bench,mutants,ui,docs]'
	"$$scratch/bin/python" -m pip freeze --exclude muster >"$$scratch/frozen"
	if grep -vE '^[A-Za-z0-9._-]+==[^ @;]+$$' "$$scratch/frozen"; then
		echo "These packages do not come from a package index, so constraints.txt was not changed." >&2
		exit 1
	fi
	{ sed -n '/^#/p' constraints.txt; LC_ALL=C sort -f "$$scratch/frozen"; } >"$$scratch/constraints.txt"
	cp "$$scratch/constraints.txt" constraints.txt
