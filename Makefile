# One line each. Every target sets up the virtual environment it needs.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
JOBS ?= 3

.PHONY: demo test quick map check bench papers shootout data fuzz soak crowd chaos up clean
$(VENV)/run: pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit("Python 3.11 or newer is needed: make PYTHON=python3.12 …" if sys.version_info < (3, 11) else 0)'
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/pip install --quiet --disable-pip-version-check -e . && touch $@
$(VENV)/dev: $(VENV)/run
	@$(BIN)/pip install --quiet --disable-pip-version-check -e '.[dev]' && touch $@

demo: $(VENV)/run  ## start four peers, run an example, show its result, stop
	@$(BIN)/python examples/demo.py
test: check  ## everything that CI runs; JOBS=1 for one test at a time
	@$(BIN)/python -m pytest -n $(JOBS) --dist loadgroup
quick: $(VENV)/dev  ## lint, and the tests that need no cluster: for the edit loop
	@$(BIN)/ruff check --quiet . && $(BIN)/python -m pytest -n $(JOBS) --dist loadgroup -m "not slow and not long"
map: $(VENV)/dev  ## update the tables of packages and modules in docs/architecture.md
	@$(BIN)/python docs/map.py
check: $(VENV)/dev  ## formatting, lint, strict types
	@mkdir -p .types/valence && ln -sfn $(foreach name,$(wildcard valence/*.py) workflow protocols peer master,../../$(name)) .types/valence/
	@$(BIN)/ruff format --check --quiet . && $(BIN)/ruff check --quiet . && $(BIN)/mypy
.bench/env: bench/requirements.txt
	@test -x $@/bin/python || $(PYTHON) -m venv $@
	@$@/bin/pip install --quiet --disable-pip-version-check -r bench/requirements.txt && touch $@
bench: $(VENV)/run .bench/env  ## the same work on Valence, Dask and Ray; ARGS=--json for scripts
	@$(BIN)/python -m bench --others .bench/env/bin/python $(ARGS)
$(VENV)/papers: $(VENV)/run
	@$(BIN)/pip install --quiet --disable-pip-version-check -e '.[papers]' && touch $@
papers: $(VENV)/papers  ## the papers' experiments, as tables and plots; ARGS="--sizes 50,100" for fewer
	@$(BIN)/python -m bench.papers.tickets $(ARGS)
	@$(BIN)/python -m bench.papers.chemical
	@$(BIN)/python -m bench.papers.pilots
	@$(BIN)/python -m bench.papers.deadline
shootout: $(VENV)/run  ## all strategies on the same work, simulated and live; ARGS=--json for scripts
	@$(BIN)/python -m bench.shootout $(ARGS)
data: $(VENV)/run  ## file transfers, live: a hot file, a killed source, corrupt chunks, a small cache
	@$(BIN)/python -m bench.data $(ARGS)
$(VENV)/fuzz: $(VENV)/dev
	@$(BIN)/pip install --quiet --disable-pip-version-check -e '.[fuzz]' && touch $@
fuzz: $(VENV)/fuzz  ## hostile input for ten minutes; ARGS="--seconds 60" for less
	@$(BIN)/python -m fuzz $(ARGS)
soak: $(VENV)/run  ## 5,000 simulated disasters, then every safety rule broken once; ARGS="--seeds 500" for fewer
	@$(BIN)/python -m sim --seeds 5000 $(ARGS)
	@$(BIN)/python -m sim --seeds 500 --slice-bytes 1 --peers 6 --every-s 1.5 --seconds 120
	@$(BIN)/python -m sim --seeds 500 --majority-lost 10
	@$(BIN)/python -m sim --seeds 500 --peers 9 --keepers 5 --majority-lost 20 \
		--faults crash,perish,stop,clog,lossy,slow-disk
	@$(BIN)/python -m sim --seeds 1000 --strategy tickets
	@$(BIN)/python -m sim --seeds 500 --strategy chemical
	@$(BIN)/python -m sim --seeds 500 --strategy chemical --overlay chord
	@$(BIN)/python -m sim --seeds 500 --strategy pilots
	@$(BIN)/python -m sim --seeds 1000 --strategy deadline
	@$(BIN)/python -m sim --seeds 500 --queue
	@$(BIN)/python -m sim --seeds 500 --mutants
crowd: $(VENV)/run  ## one hour of 1,000 simulated peers, 100 of them replaced every minute
	@$(BIN)/python -m sim --peers 1000 --workflows 200 --seconds 3600 --replaced 0.1 --faults none \
		--keepers 5 --majority-lost 30 $(ARGS)
chaos: $(VENV)/run  ## real peers killed, stopped and cut off; ARGS="kills --json" for one kind
	@$(BIN)/python -m chaos $(ARGS)
up: $(VENV)/run  ## start four peers on this machine; Ctrl-C stops them
	@$(BIN)/valence up
clean:  ## remove everything that make has made here
	@rm -rf $(VENV) .bench .types build *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
