# make lab          install, then open JupyterLab on the notebooks   (LAB_ARGS="--port 9000" hands on arguments)
# make test         install, then run the tests and every notebook
# make test-all     the same, and the long evidence
# make test-oldest  install the oldest versions that are allowed beside it, and run the tests with them
# make run          install, then run every notebook and keep its outputs
# make clean        remove the environments

PYTHON ?= python3
BIN := .venv/bin
OLDEST_BIN := .venv-oldest/bin
INSTALLED := .venv/installed
OLDEST_INSTALLED := .venv-oldest/installed
CACHE := $(CURDIR)/.venv/cache
PIP_INSTALL := -m pip install --quiet --disable-pip-version-check
# JupyterLab refuses to run as root, as in a container, unless told that it may.
ROOT_ARGS := $(if $(filter 0,$(shell id -u)),--allow-root)

.PHONY: lab test test-long test-mnist test-notebooks test-all test-oldest run clean

$(INSTALLED): pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "Python 3.11 or newer is needed, this is " + sys.version.split()[0] + "; try make PYTHON=python3.12")'
	$(PYTHON) -m venv .venv
	$(BIN)/python $(PIP_INSTALL) --editable '.[tested]'
	touch $@

$(OLDEST_INSTALLED): pyproject.toml
	$(PYTHON) -m venv .venv-oldest
	$(OLDEST_BIN)/python $(PIP_INSTALL) --editable '.[oldest]'
	touch $@

# Nothing is written to the home folder, which may be read-only.
test test-% run: export MPLCONFIGDIR := $(CACHE)/matplotlib
test test-% run: export JUPYTER_RUNTIME_DIR := $(CACHE)/jupyter/runtime
test test-% run: export JUPYTER_CONFIG_DIR := $(CACHE)/jupyter/config
test test-% run: export IPYTHONDIR := $(CACHE)/ipython
test test-% run: export TORCHINDUCTOR_CACHE_DIR := $(CACHE)/inductor

# Threads that wait sleep: on cores that are in use spinning ones make a step take ten times as long.
test test-% run: export OMP_WAIT_POLICY := PASSIVE

lab: $(INSTALLED)
	$(BIN)/jupyter lab $(ROOT_ARGS) $(LAB_ARGS) notebooks

test: $(INSTALLED)
	$(BIN)/python -m pytest -m "not long" tests
	$(MAKE) test-notebooks

test-notebooks: $(INSTALLED)
	@mkdir -p $(CACHE)
	$(BIN)/python -m pytest --nbmake --nbmake-timeout=600 --timeout=1200 notebooks

# The long evidence alone: the whole grids of which `make test` runs one telling case each.
test-long: $(INSTALLED)
	$(BIN)/python -m pytest -m long $(LONG_ARGS) tests

test-all: test test-long

# What reads MNIST, for machines that have it and ran the rest on the digits.
test-mnist: $(INSTALLED)
	$(BIN)/python -m pytest -m mnist tests
	$(MAKE) test-notebooks

test-oldest: $(OLDEST_INSTALLED)
	$(OLDEST_BIN)/python -m pytest -m "not long" tests

# Whether a target can run on this machine, as .ci/run asks: `can-TARGET` of one that needs more than Python prints in
# one line what is missing, and fails.
can-%:
	@true

run: $(INSTALLED)
	@mkdir -p $(CACHE)
	$(BIN)/jupyter nbconvert --to notebook --execute --inplace notebooks/*.ipynb

clean:
	rm -rf .venv .venv-oldest
