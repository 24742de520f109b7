# make lab    install, then open JupyterLab on the notebooks   (LAB_ARGS="--port 9000" hands on arguments)
# make test   install, then run the tests and every notebook
# make run    install, then run every notebook and keep its outputs
# make clean  remove the environment

PYTHON ?= python3
BIN := .venv/bin
INSTALLED := .venv/installed
# JupyterLab refuses to run as root, as in a container, unless told that it may.
ROOT_ARGS := $(if $(filter 0,$(shell id -u)),--allow-root)

.PHONY: lab test run clean

$(INSTALLED): pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "Python 3.11 or newer is needed, this is " + sys.version.split()[0] + "; try make PYTHON=python3.12")'
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[tested]'
	touch $@

lab: $(INSTALLED)
	$(BIN)/jupyter lab $(ROOT_ARGS) $(LAB_ARGS) notebooks

test: $(INSTALLED)
	$(BIN)/python -m pytest tests
	$(BIN)/python -m pytest --nbmake --nbmake-timeout=600 notebooks

run: $(INSTALLED)
	$(BIN)/jupyter nbconvert --to notebook --execute --inplace notebooks/*.ipynb

clean:
	rm -rf .venv
