# make demo | test | test-all | lint | docs | docs-serve | bench | soak | coverage | mutate | mutate-arithmetic | clean:
# each sets up .venv itself when needed.
# The demo needs the packages of AnyEP alone; the others add what they need to the same environment.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
READY_FOR_DEMO := $(VENV)/.ready-for-demo
READY_FOR_DOCS := $(VENV)/.ready-for-docs

.PHONY: demo test test-all lint docs docs-serve docs-version bench soak coverage mutate mutate-arithmetic clean

demo: $(READY_FOR_DEMO)
	$(BIN)/anyep demo --ranks 8

# What a change may break, in minutes; WORKERS processes run it side by side.
WORKERS ?= 2
PYTEST := $(BIN)/python -m pytest -n $(WORKERS) --dist loadgroup
test: $(READY)
	$(PYTEST) -m "not slow"

# The rest: soaks, rare sizes, every example, more draws of each property; then coverage and mutations.
test-all: $(READY)
	DEEP_TESTS=1 $(PYTEST) -o timeout=1500 -m "slow or property"
	$(MAKE) coverage
	$(MAKE) mutate ALLOW=2

lint: $(READY)
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

# The site, from docs/ and mkdocs.yml, into site/; a warning is an error.
MKDOCS := NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs
docs: $(READY_FOR_DOCS)
	$(MKDOCS) build --strict

docs-serve: $(READY_FOR_DOCS)
	$(MKDOCS) serve

# Add the site as one version to the local branch gh-pages: make docs-version VERSION=0.2. It pushes nothing.
docs-version: $(READY_FOR_DOCS)
	PATH="$(abspath $(BIN)):$$PATH" NO_MKDOCS_2_WARNING=1 $(BIN)/mike deploy --update-aliases $(VERSION) latest
	PATH="$(abspath $(BIN)):$$PATH" NO_MKDOCS_2_WARNING=1 $(BIN)/mike set-default latest

bench: $(READY)
	$(BIN)/python tools/bench_startup.py
	$(BIN)/anyep bench --mode normal --ranks 8 --tokens 512 --hidden 7168 --experts 64 --topk 8

# Everything that may vary varies, for as long as asked: make soak MINUTES=60 SEED=7
MINUTES ?= 5
SEED ?=
soak: $(READY)
	$(BIN)/python tools/soak.py --minutes $(MINUTES) $(if $(SEED),--seed $(SEED))

# The arithmetic that everything else stands on is covered to the last branch.
ARITHMETIC := sizes topology layout
coverage: $(READY)
	$(BIN)/coverage run --include='$(subst $() ,$(comma),$(ARITHMETIC:%=anyep/%.py))' -m pytest \
		$(ARITHMETIC:%=tests/unit/test_%.py) $(ARITHMETIC:%=anyep/%.py)
	$(BIN)/coverage report --show-missing --fail-under=100
comma := ,

# Change the code in one place at a time and check that a test fails. Minutes. Some changes are wrong only when
# ranks happen to meet in a certain order, which not every machine shows: ALLOW so many survivors.
ALLOW ?= 0
mutate: $(READY)
	$(BIN)/python tools/mutate.py --jobs $(WORKERS) --allow $(ALLOW)

# Every constant and operator of the arithmetic. Many minutes, so not part of test-all.
mutate-arithmetic: $(READY)
	$(BIN)/python tools/mutate.py --jobs $(WORKERS) --operators $(ARITHMETIC:%=anyep/%.py)

$(READY): pyproject.toml constraints.txt tools/make_venv.py
	$(PYTHON) tools/make_venv.py $(VENV) dev,plot,cuda,network,examples
	touch $@ $(READY_FOR_DEMO)

$(READY_FOR_DOCS): pyproject.toml constraints.txt tools/make_venv.py
	$(PYTHON) tools/make_venv.py $(VENV) docs
	touch $@ $(READY_FOR_DEMO)

$(READY_FOR_DEMO): pyproject.toml constraints.txt tools/make_venv.py
	$(PYTHON) tools/make_venv.py $(VENV)
	touch $@

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis .coverage dist build site
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
