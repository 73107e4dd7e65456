# Every target installs what it needs into .venv, again when pyproject.toml or constraints.txt
# change in content, this folder was moved or copied, or Python is another one. Nothing but python3
# and make need be there before.

PYTHON ?= python3
BIN := .venv/bin
CONTENT := $(shell cat pyproject.toml constraints.txt scripts/install.py | $(PYTHON) -c \
	'import hashlib, os, sys; place = str((os.getcwd(), sys.version_info[:2])).encode(); \
	print(hashlib.sha256(sys.stdin.buffer.read() + place).hexdigest()[:12])')
FOR_PLAN := .venv/.installed-plan-$(CONTENT)
FOR_UP := .venv/.installed-up-$(CONTENT)
FOR_ALL := .venv/.installed-all-$(CONTENT)
PACKAGES := agents planner sailor sailord simulator worker
# The commands are started hundreds of times; where Python may not keep what it compiled, a start
# takes up to twice as long.
unexport PYTHONDONTWRITEBYTECODE
# How many random cases each property tries in `make sim` and `make chaos`.
EXAMPLES ?= 500
# How many lives of a simulated cluster `make sim` tries, and from which seed on.
SEEDS ?= 2000
FIRST ?= 1

.DEFAULT_GOAL := help

.PHONY: help
help: ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' Makefile | while IFS="$$(printf '\t')" read -r name what; \
		do printf '  make %-10s %s\n' "$$name" "$$what"; done

.PHONY: up
up: $(FOR_UP) ## a cluster on this machine that trains, until Ctrl-C
	@$(BIN)/sailorctl up

# ZONES=FILE names other zones (docs/formats.md); needs root.
ZONES ?= examples/zones.toml
.PHONY: zones
zones: $(FOR_UP) ## `make up` with delays and rates between zones, in network namespaces (ZONES=FILE); needs root
	@$(BIN)/sailorctl up --zones $(ZONES)

.PHONY: tour
tour: $(FOR_UP) ## `make up` without a person: nodes are lost and added, losses compared
	@$(BIN)/sailorctl tour

.PHONY: plan-tour
plan-tour: $(FOR_PLAN) ## what simulator and planner say, with real numbers
	$(BIN)/python examples/plan_tour.py

# Tests run in JOBS processes and in a random order; ORDER=NUMBER repeats one.
JOBS ?= $(shell n=$$(env -u OMP_NUM_THREADS nproc); test $$n -gt 8 && n=8; echo $$n)
ifndef ORDER
ORDER := $(shell date +%s)
endif
PYTEST = $(BIN)/python -m pytest -q -n $(JOBS) --dist worksteal -p randomly \
	--randomly-seed $(ORDER)

.PHONY: test
test: $(FOR_ALL) ## run the tests of every part: 4 to 8 minutes on two cores (JOBS=2 ORDER=1)
	@echo "4 to 8 minutes on two idle cores. What is skipped stands at the end, with the reason;"
	@echo "\`make test-slow\` runs the long tests. This order again: make test ORDER=$(ORDER)"
	@$(PYTEST) -m "not slow"

# Long tests wait for processes a quarter of their time, so one more of them runs than there are cores.
.PHONY: test-slow
test-slow: JOBS := $(shell echo $$(($(JOBS) + 1)))
test-slow: $(FOR_ALL) ## run the tests that take more than 2 s each: 20 minutes on two idle cores
	@echo "About 20 minutes on two idle cores. What is skipped stands at the end, with the reason."
	@echo "This order again: make test-slow ORDER=$(ORDER)"
	@$(PYTEST) -m slow

.PHONY: check
check: $(FOR_ALL) ## lint, formatting and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy --strict $(PACKAGES) scripts
	$(BIN)/mypy --strict --explicit-package-bases --exclude 'test_.*' benchmarks tests/booted tests/chaos tests/sim

.PHONY: file-lists
file-lists: ## write the lists of files in the packages' READMEs, from the first line of each file
	@$(PYTHON) scripts/file_lists.py

# The estimator against its oracle on many random plans, and a whole cluster on a virtual clock.
SCRIPTS ?= 200
.PHONY: sim
sim: $(FOR_ALL) ## random cases against the oracles (EXAMPLES=500), scripts of a cloud (SCRIPTS=200), lives of a cluster (SEEDS=2000 FIRST=1)
	SAILOR_EXAMPLES=$(EXAMPLES) $(BIN)/python -m pytest tests -m sim -q --ignore=tests/sim -o faulthandler_timeout=0
	SAILOR_EXAMPLES=1 SAILOR_SCRIPTS=$(SCRIPTS) $(BIN)/python -m pytest tests/gce/test_gce_scripts.py tests/gce/test_gce_random.py tests/gce/test_gce_queue.py -q -o faulthandler_timeout=0
	$(BIN)/python -m tests.sim --seeds $(SEEDS) --first $(FIRST)

# Input files damaged at random must be answered with a list of problems; sailord and agents are
# killed fifty times each under a job, leaders die, and the store is away for a minute. Then all that
# docs/chaos.md names is done to a cluster that trains, for so many MINUTES. JOB=tale: not the exact
# model but a small LLaMA.
MINUTES ?= 10
SEED ?= 1
JOB ?= exact
.PHONY: chaos
chaos: $(FOR_ALL) ## damaged input, killed daemons (EXAMPLES=500), a storm of faults (MINUTES=10 SEED=1 JOB=exact)
	@SAILOR_EXAMPLES=$(EXAMPLES) SAILOR_CHAOS_MINUTES=$(MINUTES) SAILOR_CHAOS_SEED=$(SEED) \
		SAILOR_CHAOS_JOB=$(JOB) $(BIN)/python -m pytest tests -m chaos -q -o faulthandler_timeout=0

# A systemd of its own, in a container on a tree of its own (tests/booted): needs root. Trees are
# cached in SAILOR_UNITS_CACHE or ~/.cache/sailor/units. OPTIONS: --keep-going, --skip NAME, --mirror.
.PHONY: units
units: $(FOR_PLAN) ## boot the units under a real systemd, in a container, and drill them; needs root
	@$(BIN)/python -m tests.booted $(OPTIONS)

# OSV=FILE: https://osv-vulnerabilities.storage.googleapis.com/PyPI/all.zip
.PHONY: audit
audit: $(FOR_ALL) ## compare the pinned packages with known advisories (OSV=FILE, a zip of OSV documents)
	@$(BIN)/python scripts/dependencies.py audit "$(or $(OSV),$(error OSV=FILE: name a downloaded all.zip))"

# MEASURED=DIR names a folder with profiles, network.json and validation.json, for the programs
# that compare with measurements. A program ends with 2 where it cannot measure, and with 3 where it
# missed a target (benchmarks/machine.py); any other status is a defect, and fails at the end.
.PHONY: bench
BENCHES := simulate megatron_papers plan_quality sailorctl runtime chunks read_ahead overhead store \
	reconfigure checkpoint control notices page fidelity
bench: $(FOR_ALL) ## print the benchmarks' tables (MEASURED=DIR: also those that need measurements)
	@failed=; run() { echo "== $$*"; status=0; $(BIN)/python -m benchmarks."$$@" || status=$$?; \
		case $$status in \
			0) ;; \
			2) echo "$$1: could not be measured here" ;; \
			3) echo "$$1: a target was missed" ;; \
			*) echo "$$1: FAILED with status $$status"; failed="$$failed $$1" ;; \
		esac; }; \
	for name in $(BENCHES); do run $$name; done; \
	if test -n "$(MEASURED)"; then \
		run accuracy --profiles "$(MEASURED)" --cases "$(MEASURED)/validation.json"; \
		for name in calibrate planning replan; do run $$name --profiles "$(MEASURED)"; done; \
		run planners "$(MEASURED)"; \
		run other_systems --runs "$(MEASURED)/public_runs.json" --catalogue "$(MEASURED)/public_runs_catalogue.toml"; \
	else echo "the others need measurements: make bench MEASURED=DIR"; fi; \
	test -z "$$failed" || { echo "failed:$$failed"; exit 1; }

# A real sailord and real agents under attack by strangers, a hostile job and an agent that lies; the
# worst flood goes on for so many ATTACK_MINUTES. Prints what each attack cost before and costs now.
ATTACK_MINUTES ?= 10
.PHONY: attack
attack: $(FOR_ALL) ## attacks by strangers and by jobs, and what each costs (ATTACK_MINUTES=10)
	@SAILOR_EXAMPLES=1 SAILOR_ATTACK_MINUTES=$(ATTACK_MINUTES) $(BIN)/python -m pytest tests/attacks -q -o faulthandler_timeout=0

# A local cluster trains with changes of plan while memory, descriptors, threads, store and logs of every
# process are sampled; fails if one still rises after the warm-up. All samples: build/soak.csv.
SOAK_MINUTES ?= 60
.PHONY: soak
soak: $(FOR_UP) ## does a training cluster's memory level off? (SOAK_MINUTES=60)
	@mkdir -p build
	@$(BIN)/python -m benchmarks.soak --minutes $(SOAK_MINUTES) --out build/soak.csv

# Needs torch with CUDA and numpy, installs nothing: with .venv if there is one, else with PYTHON. Each part
# says what it lacks. WITH="--device cpu --quick" runs it without a GPU.
.PHONY: gpu-check
gpu-check: ## on a machine with a GPU: what works and how fast, in 9 minutes; writes build/gpu-check (WITH=--quick)
	@$(if $(wildcard $(BIN)/python),$(BIN)/python,$(PYTHON)) -m benchmarks.gpu_check $(WITH)

# DESTDIR=/ puts a version into this system beside those that are there, and switches to it; any
# other folder becomes a tree for one. GROUPS=worker adds what real workers need. PYTHON must be one
# that the units' user can run.
.PHONY: install
install: $(if $(DESTDIR),,$(FOR_ALL)) ## make .venv with all groups; with DESTDIR=DIR, lay out a system instead (GROUPS=worker)
	@test -z "$(DESTDIR)" || $(PYTHON) scripts/system.py "$(DESTDIR)" $(GROUPS:%=--group %)

.PHONY: uninstall
uninstall: ## remove what `make install DESTDIR=/` installed, but no configuration or state (PURGE=1: these, too)
	@$(PYTHON) scripts/installed.py --root "$(or $(DESTDIR),/)" uninstall $(if $(filter-out 0,$(PURGE)),--purge)

$(FOR_PLAN) $(FOR_UP) $(FOR_ALL):
	@$(PYTHON) scripts/install.py $@
