# make lab          install, then open JupyterLab on copies of the notebooks in work/   (LAB_ARGS="--port 9000" hands on
#                   arguments, ORIGINALS=1 opens the originals)
# make lab TORCH=cpu the same with PyTorch's CPU build: 2 GB of disk instead of 7
# make reset        take one of the copies anew   (NOTEBOOK=3)
# make test         install, then run the tests, every notebook and, if a package index answers, test-tools
# make test-all     the same, and every slower check that this machine can run
# make test-browser every notebook in JupyterLab, in a browser
# make test-cluster namespaces and a real Slurm on this machine: needs root and Debian packages, says which
# make test-gpu     eight minutes on this machine's GPUs, with any Python that has PyTorch (PYTHON=python3); installs nothing
# make test-spawn   as on macOS: ranks are spawned, and neither /proc nor prctl is there
# make test-imagined CPU ranks, a notebook and `doctor --gpu` beside GPUs that do not exist: needs gcc
# make test-tools   install transformers and accelerate beside it, and run what compares 13 and 14 with them
# make test-tools-long their long evidence: kills, eight ranks, every model on three
# make test-oldest  install the oldest versions that are allowed beside it, and run the tests with them
# make failures     list the scripts of notebooks/failures/ in its README
# make run          install, then run every notebook and keep its outputs   (NOTEBOOKS="03 09" for some of them)
# make figures      take README's picture from the saved output of 04
# make handouts     the notebooks on paper, without solutions, in handouts/   (NOTEBOOKS="03 09", HANDOUT_ARGS=--solutions)
# make slides       the notebooks as slides to project, in slides/   (NOTEBOOKS="03 09")
# make book         the executed notebooks, README and the glossary as a site, in book/ (installs Sphinx beside it)
# make test-book    its links, its pictures and its search
# make links        the links that open this project in Colab, on Kaggle, in a codespace and on a JupyterHub   (HUB=ADDRESS)
# make offline      one folder, offline/, with all that laptops without a network need   (OFFLINE=DIR)
# make lint         check the style of the code; `make format` fixes what a program can fix
# make relock       take the newest versions that the registry serves into requirements.lock
# make xla          install PyTorch/XLA in an environment of its own (3 minutes, 7 GB), and run what needs it
# make xla-all      the same, and its long evidence
# make clean        remove the environments

PYTHON ?= python3
BIN := .venv/bin
OLDEST_BIN := .venv-oldest/bin
INSTALLED := .venv/installed
OLDEST_INSTALLED := .venv-oldest/installed
TOOLS_BIN := .venv-tools/bin
TOOLS_INSTALLED := .venv-tools/installed
TOOLS_PACKAGES := transformers==5.23.0 tokenizers==0.23.3 accelerate==1.15.0 peft==0.21.2
DOCS_BIN := .venv-docs/bin
DOCS_INSTALLED := .venv-docs/installed
PYODIDE := pyodide@314.0.7
DOCS_PACKAGES := sphinx==9.0.4 docutils==0.22.4 myst-nb==1.4.0 myst-parser==5.2.0 sphinx-book-theme==1.4.0 pydata-sphinx-theme==0.20.0
XLA_BIN := .venv-xla/bin
XLA_INSTALLED := .venv-xla/installed
XLA_PACKAGES := torch==2.9.1 torch_xla==2.9.0 numpy
WORK ?= work
OFFLINE ?= offline
CACHE := $(CURDIR)/.venv/cache
# Markers of tests that need more than the installation.
PLAIN := not xla and not browser and not cluster and not simulated
# Notebooks or files of long tests that run at a time, and files of fast tests, which take less memory and wait a lot:
# `make test WORKERS=1 FAST_WORKERS=1` where memory is short.
WORKERS ?= 2
FAST_WORKERS ?= 3
# Some tests and cells are about the number of threads that torch and torchrun choose, so that of your shell is taken away.
PYTEST = env -u OMP_NUM_THREADS $(BIN)/python -m pytest --numprocesses $(WORKERS) --dist loadfile
FAST_TESTS = $(PYTEST) --durations=25 --numprocesses $(FAST_WORKERS) -m "not long and $(PLAIN)" tests
# The longest first: the last one to end should be short, since the other worker has nothing left to do.
LONG_NOTEBOOKS := $(foreach number,04 07 13 10 06 08 11 14,$(wildcard notebooks/$(number)_*.ipynb))
NOTEBOOKS_TOO = $(PYTEST) --nbmake --timeout=1200 $(LONG_NOTEBOOKS) $(filter-out $(LONG_NOTEBOOKS),$(sort $(wildcard notebooks/*.ipynb)))
PIP_INSTALL := -m pip install --quiet --disable-pip-version-check
# uv installs, where it is there; `make lab UV=` takes pip.
UV ?= $(shell command -v uv 2> /dev/null)
# Which build of PyTorch: the ordinary one, or `cpu`. An environment keeps the one that it was made with.
TORCH ?= $(shell cat $(INSTALLED) 2> /dev/null)
# Everything comes from the lock, and so does what builds the project itself.
install_lock = $(PYTHON) docs/install.py --torch '$(TORCH)' --uv '$(UV)'
# One version of each package for every Python and system; without hashes, so that another build of the same version
# (PyTorch for the CPU alone, a company's mirror) will do.
LOCK = $(BIN)/uv pip compile --quiet --universal --python-version 3.11 --fork-strategy fewest --extra notebooks --extra tests --custom-compile-command 'make relock' pyproject.toml
.PHONY: lab reset figures links handouts slides book offline test test-book test-browser test-long test-mnist test-notebooks test-all test-cluster test-network test-slurm test-gpu test-spawn test-imagined test-oldest test-tools test-tools-long xla xla-all lint format relock run clean

$(INSTALLED): requirements.lock pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "Python 3.11 or newer is needed, this is " + sys.version.split()[0] + "; try make PYTHON=python3.12")'
	@$(install_lock) .venv requirements.lock
	@echo '$(TORCH)' > $@

$(OLDEST_INSTALLED): TORCH :=
$(OLDEST_INSTALLED): oldest.lock pyproject.toml
	@$(install_lock) .venv-oldest oldest.lock
	@touch $@

# An environment with a few packages more: all else is that of the environment above, which a .pth file brings in.
define install_beside
rm -rf $(1)
$(PYTHON) -m venv $(1)
$(BIN)/python -c 'import site; print(f"import site; site.addsitedir({site.getsitepackages()[0]!r})")' \
  > "$$($(1)/bin/python -c 'import site; print(site.getsitepackages()[0])')/environment.pth"
$(1)/bin/python $(PIP_INSTALL) --constraint requirements.lock $(2)
touch $(1)/installed
endef

$(TOOLS_INSTALLED): $(INSTALLED) Makefile
	$(call install_beside,.venv-tools,$(TOOLS_PACKAGES))

$(DOCS_INSTALLED): $(INSTALLED) Makefile
	$(call install_beside,.venv-docs,$(DOCS_PACKAGES))
	if command -v npm > /dev/null; then cd .venv-docs && tar xzf "$$(npm pack --silent $(PYODIDE))"; fi

# The last torch_xla fits one version of torch, so it has an environment of its own.
$(XLA_INSTALLED): Makefile
	@echo "PyTorch/XLA: torch 2.9.1 and torch_xla 2.9.0 go into .venv-xla; that takes 3 minutes and 7 GB."
	$(PYTHON) -m venv .venv-xla
	$(XLA_BIN)/python $(PIP_INSTALL) $(XLA_PACKAGES)
	touch $@

RUNS := test test-% run xla xla-all relock
# Nothing is written to the home folder, which may be read-only.
$(RUNS): export MPLCONFIGDIR := $(CACHE)/matplotlib
$(RUNS): export JUPYTER_RUNTIME_DIR := $(CACHE)/jupyter/runtime
$(RUNS): export JUPYTER_CONFIG_DIR := $(CACHE)/jupyter/config
$(RUNS): export IPYTHONDIR := $(CACHE)/ipython
$(RUNS): export UV_CACHE_DIR := $(CACHE)/uv
$(RUNS): export TORCHINDUCTOR_CACHE_DIR := $(CACHE)/inductor
$(RUNS): export HF_HOME := $(CACHE)/huggingface

# Threads that wait sleep: on cores that are in use spinning ones make a step take ten times as long.
$(RUNS): export OMP_WAIT_POLICY := PASSIVE

# What torchrun would write into log files is shown in the notebook; left alone, every run of it leaves a folder in /tmp.
$(RUNS): export PET_LOG_DIR := /dev/null

lab: $(INSTALLED)
	@[ '$(TORCH)' = "$$(cat $(INSTALLED))" ] || { echo '.venv has another build of PyTorch; run `make clean` first' >&2; exit 1; }
	$(BIN)/python -m fsdp_helpers lab --copies '$(WORK)' $(if $(ORIGINALS),--originals) $(LAB_ARGS)

failures:
	$(PYTHON) -m fsdp_helpers.field_guide

reset:
	$(PYTHON) -m fsdp_helpers.cli.lab.working_copies '$(WORK)' --reset '$(NOTEBOOK)'

figures:
	$(PYTHON) docs/figures.py

links:
	@$(PYTHON) docs/links.py $(HUB)

handouts: $(INSTALLED)
	$(BIN)/python -m fsdp_helpers.cli.lab.handouts $(HANDOUT_ARGS) $(NOTEBOOKS)

slides: $(INSTALLED)
	$(BIN)/python -m fsdp_helpers.cli.lab.slides $(NOTEBOOKS)

# A reference that leads nowhere fails it. The first page is README's, under the name that servers look for, too.
book: $(DOCS_INSTALLED)
	rm -rf book
	$(DOCS_BIN)/python -m sphinx --quiet --fail-on-warning --keep-going --doctree-dir $(CACHE)/doctrees --conf-dir docs . book
	rm -rf jupyter_execute
	cp book/README.html book/index.html
	@test -d .venv-docs/package || echo "npm is missing, so the book has no pages that plan and explain; see nodejs.org"
	@echo "open book/index.html"

test-book: $(DOCS_INSTALLED)
	$(DOCS_BIN)/python -m pytest tests/test_book.py

# The packages of the lock as wheels for machines like this one, the last commit, MNIST if it is here whole, and laptop.sh,
# which sets a laptop up from them. Wheels that are there already stay.
offline: $(INSTALLED)
	@echo "about 3 GB of packages, most of it PyTorch with its CUDA libraries"
	mkdir -p '$(OFFLINE)/packages' '$(OFFLINE)/data'
	$(BIN)/python -m pip wheel --quiet --disable-pip-version-check --no-deps --find-links '$(OFFLINE)/packages' \
	  --requirement requirements.lock --wheel-dir '$(OFFLINE)/packages'
	git bundle create --quiet '$(OFFLINE)/fsdp.bundle' HEAD
	cp docs/laptop.sh '$(OFFLINE)'
	rm -f '$(OFFLINE)'/data/*
	@if [ $$(ls data/MNIST/raw 2> /dev/null | grep --count 'ubyte$$') = 4 ]; then cp data/MNIST/raw/*ubyte '$(OFFLINE)/data'; \
	  else echo "no MNIST here, so laptops use the bundled digits"; fi
	@$(BIN)/python -c 'import sys, sysconfig; print(*sys.version_info[:2], sysconfig.get_platform())' > '$(OFFLINE)/contents.txt'
	@ls '$(OFFLINE)/data' >> '$(OFFLINE)/contents.txt'
	@[ -z "$$(git status --porcelain)" ] || echo "it has the last commit: changes that are not committed are not in it"
	@echo "$(OFFLINE): $$(du -sh '$(OFFLINE)' | cut -f1), for Python $$(head -1 '$(OFFLINE)/contents.txt')"
	@echo "to serve it: python3 -m http.server --directory $(OFFLINE) 8000"

# With and without transformers and accelerate: the last line installs them beside the environment, or says why not.
test: $(INSTALLED)
	$(FAST_TESTS)
	$(MAKE) test-notebooks
	@if why=$$($(MAKE) --silent --no-print-directory can-test-tools 2> /dev/null); then $(MAKE) test-tools; \
	  else echo "test-tools is left out: $${why:-can-test-tools does not say why}"; fi

test-notebooks: $(INSTALLED)
	@mkdir -p $(CACHE)
	$(NOTEBOOKS_TOO)

# The long evidence alone: the whole grids of which `make test` runs one telling case each.
test-long: $(INSTALLED)
	$(PYTEST) -m "long and $(PLAIN)" $(LONG_ARGS) tests

# Everything, in one list; what this machine lacks is said, and left out.
SLOWER := test-long test-spawn test-tools-long test-book test-mnist test-imagined test-browser test-network test-slurm test-oldest xla
test-all: test
	@for target in $(SLOWER); do \
	  if why=$$($(MAKE) --silent --no-print-directory can-$$target 2> /dev/null); then $(MAKE) $$target || exit 1; \
	  else echo "$$target is left out: $${why:-can-$$target does not say why}"; fi; done

# The variables lead to Jupyter's templates and extensions, which are in the first environment's folders.
test-browser: $(DOCS_INSTALLED) can-test-browser
	$(DOCS_BIN)/python -m pip show --quiet playwright || $(DOCS_BIN)/python $(PIP_INSTALL) playwright==1.65.2
	JUPYTER_PATH=$(CURDIR)/.venv/share/jupyter JUPYTER_CONFIG_PATH=$(CURDIR)/.venv/etc/jupyter $(DOCS_BIN)/python -m pytest -m browser $(BROWSER_ARGS) tests/browser

# What reads MNIST, for machines that have it and ran the rest on the digits.
test-mnist: $(INSTALLED)
	$(PYTEST) -m mnist tests
	$(MAKE) test-notebooks

# Installs nothing: where root or a package is missing, it says so.
test-cluster: test-network test-slurm

test-network: $(INSTALLED)
	$(BIN)/python -m pytest -m cluster tests/evidence/test_network.py

test-slurm: $(INSTALLED)
	$(BIN)/python -m pytest -m cluster tests/evidence/test_slurm.py

# With $(PYTHON) itself: a GPU is often at hand for minutes, on a machine that has PyTorch and nothing else. The caches
# that other targets keep in .venv stay where libraries keep them.
test-gpu:
	@env -u MPLCONFIGDIR -u TORCHINDUCTOR_CACHE_DIR -u HF_HOME PYTHONPATH='$(CURDIR):$(CURDIR)/tests:$(CURDIR)/tests/helpers'"$${PYTHONPATH:+:$$PYTHONPATH}" \
	  $(PYTHON) -m on_gpu

# tests/without_proc hides from the package what only Linux has.
test-spawn: export FSDP_START_METHOD := spawn
test-spawn: export PYTHONPATH := $(CURDIR)/tests/without_proc
test-spawn: $(INSTALLED)
	@mkdir -p $(CACHE)
	$(PYTEST) -m "not long and $(PLAIN)" tests/ranks
	$(PYTEST) -m "not long" -k "equals_ddp_step or five_steps or killed_on or killed_from" tests/sharding/test_strategies.py tests/checkpointing/test_resume.py
	$(PYTEST) --nbmake --timeout=1200 $(foreach number,00 03 06,$(wildcard notebooks/$(number)_*.ipynb))

# A GPU nearby does no harm: shown with a CUDA driver of our own, which makes torch believe in GPUs.
test-imagined: $(INSTALLED)
	$(PYTEST) --dist load -m simulated tests/simulated_gpu

# What is skipped where transformers and accelerate are not installed.
test-tools: $(TOOLS_INSTALLED)
	$(TOOLS_BIN)/python -c 'import accelerate, transformers; print(f"transformers {transformers.__version__}, accelerate {accelerate.__version__}")'
	$(TOOLS_BIN)/python -m pytest -m "tools and not long" tests

test-tools-long: $(TOOLS_INSTALLED)
	$(TOOLS_BIN)/python -m pytest -m "tools and long" tests

test-oldest: BIN := $(OLDEST_BIN)
test-oldest: $(OLDEST_INSTALLED)
	@mkdir -p $(CACHE)
	$(FAST_TESTS)
	$(NOTEBOOKS_TOO)

# The variable says that nothing may be skipped or replaced by a kept record.
xla xla-all: export FSDP_XLA_PYTHON := $(CURDIR)/$(XLA_BIN)/python
xla: $(INSTALLED) $(XLA_INSTALLED)
	@mkdir -p $(CACHE)
	$(BIN)/python -m pytest -m "xla and not long" tests/xla
	$(BIN)/python -m pytest --nbmake --timeout=1200 notebooks/12_xla.ipynb

xla-all: xla
	$(BIN)/python -m pytest -m "xla and long" tests/xla

# Whether a target can run on this machine: `can-TARGET` of one that needs more than Python prints in one line what is
# missing, and fails.
can-%:
	@true

can-test-browser:
	@command -v chromium > /dev/null || command -v chromium-browser > /dev/null || command -v google-chrome > /dev/null \
	  || { echo "no Chromium on the search path; \`apt-get install chromium\` brings it"; exit 1; }

missing_for = $(BIN)/python -c 'import sys; from $(1) import missing; sys.exit(missing())'

can-test-network: $(INSTALLED)
	@PYTHONPATH=tests/helpers:tests/evidence $(call missing_for,network)

can-test-slurm: $(INSTALLED)
	@PYTHONPATH=tests/helpers:tests/evidence $(call missing_for,slurm)

can-test-mnist:
	@ls data/MNIST/raw/*.gz > /dev/null 2>&1 || { echo "no MNIST: its four .gz files are not in data/MNIST/raw"; exit 1; }

enough_disk = df -Pk . | awk 'NR == 2 && $$4 < $(1) * 1000000 {print "it needs $(1) GB of disk"; exit 1}'

can-test-imagined:
	@command -v gcc > /dev/null || { echo "no gcc on the search path; \`apt-get install gcc libc6-dev\` brings it"; exit 1; }

can-test-oldest:
	@$(PYTHON) -c 'import sys; sys.exit("Python 3.11 or 3.12 is needed: the oldest versions have no builds for newer ones" if sys.version_info >= (3, 13) else 0)'
	@$(call enough_disk,7)

index_has = for package in $(1); do \
  $(BIN)/python -m pip --retries 1 --timeout 10 index versions "$${package%%==*}" 2> /dev/null | grep -qF "$${package\#\#*==}" \
  || { echo "no package index is at hand that has $$package"; exit 1; }; done

can-test-tools: $(INSTALLED)
	@$(call index_has,$(TOOLS_PACKAGES))

can-test-book: $(INSTALLED)
	@$(call index_has,$(DOCS_PACKAGES))

can-xla: $(INSTALLED)
	@$(call enough_disk,8)
	@$(BIN)/python -m pip index versions torch_xla 2> /dev/null | grep -q 'versions:.* 2\.9\.0' \
	  || { echo "no package index is at hand that has torch_xla 2.9.0 for this version of Python"; exit 1; }

lint: $(INSTALLED)
	$(BIN)/ruff check --no-cache .
	$(BIN)/ruff format --no-cache --check .

format: $(INSTALLED)
	$(BIN)/ruff check --no-cache --fix .
	$(BIN)/ruff format --no-cache .

relock: $(INSTALLED)
	$(LOCK) --upgrade --group dev --output-file requirements.lock
	$(LOCK) --upgrade --resolution lowest-direct --output-file oldest.lock

run: $(INSTALLED)
	@mkdir -p $(CACHE)
	$(BIN)/python -m fsdp_helpers.cli.lab.run_notebooks $(NOTEBOOKS)

clean:
	rm -rf .venv .venv-oldest .venv-tools .venv-docs .venv-xla
