# One verb each. `make help` lists them. Everything lives in .venv inside the project.
SHELL := /bin/bash
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
TORCH ?= 2.15.0
COMPAT_TORCH ?= 2.8.0
# Both are tested, each from a folder of its own. The second asks for Python 3.12, and works on 3.11.
MEGATRON := 0.16.1 0.19.2
# Without what they can do without, so that few packages are added; tests of the rest are skipped where it is missing.
FRAMEWORKS := torchtitan==0.3.0 tyro docstring_parser typeguard torchdata tokenizers spmd_types==0.2.3 lightning==2.6.6 lightning_utilities torchmetrics accelerate==1.15.0 tqdm pyyaml
RUST_SOURCES := $(shell find rust -name '*.rs' -not -path '*/target/*' -not -path '*/fuzz/*') Cargo.toml Cargo.lock $(wildcard rust/*/Cargo.toml)
PY_SOURCES := $(shell find python -name '*.py' -o -name '*.pyi' -o -name py.typed)

# The tests start hundreds of processes that import torch. Where bytecode is not kept, which images of containers ask for,
# each of them compiles all of torch's modules again: 8 s of CPU for torch and tensorferry.dcp, instead of 3.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help
help: ## list the verbs
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 16

$(VENV)/.deps: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -q --disable-pip-version-check 'uv>=0.8,<1'
	$(BIN)/uv pip install -q --python $(BIN)/python 'torch==$(TORCH)' 'torchft==0.2.0' \
	  $$($(BIN)/python -c "import tomllib; o = tomllib.load(open('pyproject.toml', 'rb'))['project']['optional-dependencies']; print(*(repr(r) for r in o['dev'] + o['bench'] + o['docs'] + o['cli'] + o['objects']))" | tr -d "'")
	for release in $(MEGATRON); do \
	  $(BIN)/uv pip install -q --python $(BIN)/python --python-version 3.12 --no-deps \
	    --target $(VENV)/megatron-$$release "megatron-core==$$release" || exit 1; \
	done
	$(BIN)/uv pip install -q --python $(BIN)/python --no-deps --target $(VENV)/frameworks $(FRAMEWORKS)
	touch $@

# The wheel is abi3 and knows no torch: one is good for every venv, so a new venv is no reason to build it again.
dist/.wheel: $(RUST_SOURCES) $(PY_SOURCES) pyproject.toml README.md | $(VENV)/.deps
	rm -rf dist
	$(BIN)/maturin build --release --quiet --out dist --interpreter $(BIN)/python
	$(BIN)/python tests/project/check_wheel.py dist
	touch $@

$(VENV)/.installed: dist/.wheel
	rm -f $(VENV)/.linked $(VENV)/.under-test
	$(BIN)/uv pip install -q --python $(BIN)/python --reinstall --no-deps dist/*.whl
	touch $@

.PHONY: build
build: $(VENV)/.installed ## build the wheel and install it into .venv

# The Python sources are linked, so that a changed line of them can be tried at once; Rust is built without link-time
# optimisation. `make build` puts the wheel back.
.PHONY: dev
dev: $(VENV)/.deps ## link the Python sources into .venv, and build what has changed of Rust
	rm -f $(VENV)/.installed $(VENV)/.under-test
	VIRTUAL_ENV=$(CURDIR)/$(VENV) $(BIN)/maturin develop --uv --quiet --profile incremental
	touch $(VENV)/.linked

# The server in Rust that tests of object stores run against; without it they run against moto's alone.
.PHONY: object-stores
object-stores: ## build s3s-fs, a server of object storage for the tests, into build/object-stores
	cargo install --quiet --locked s3s-fs --version 0.14.1 --features binary --root build/object-stores

# Linked by zig against the glibc of torch's own wheels, so that it installs wherever they do.
GLIBC := 2_28
TARGET ?= x86_64-unknown-linux-gnu
.PHONY: wheel
wheel: $(VENV)/.deps ## the wheel for a release: for glibc 2.28 and later, checked, in dist/release; TARGET=aarch64-unknown-linux-gnu
	$(BIN)/uv pip install -q --python $(BIN)/python 'ziglang>=0.15,<1'
	rm -rf dist/release/$(TARGET)
	PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/maturin build --release --quiet --zig --compatibility manylinux_$(GLIBC) \
	  --target $(TARGET) --out dist/release/$(TARGET) --target-dir target/zig --interpreter $(BIN)/python
	$(BIN)/python tests/project/check_wheel.py dist/release/$(TARGET) $(GLIBC)

.PHONY: sdist
sdist: $(VENV)/.deps ## the source distribution, and a wheel that is built from it outside the checkout, in dist/sdist
	rm -rf dist/sdist
	$(BIN)/maturin sdist --out dist/sdist
	cd / && $(CURDIR)/$(BIN)/python -m pip wheel -q --disable-pip-version-check --no-deps \
	  --wheel-dir $(CURDIR)/dist/sdist/built $(CURDIR)/dist/sdist/*.tar.gz
	$(BIN)/python tests/project/check_wheel.py dist/sdist/built

PYTHONS ?= python3.11 python3.12 python3.13
PYTHONS_ARGS ?= tests/state tests/pickles tests/storage tests/net tests/memory tests/transport -m 'not slow'
.PHONY: pythons
pythons: wheel ## the wheel for a release, installed and tested under each of PYTHONS, in an environment of its own
	for python in $(PYTHONS); do \
	  venv=build/pythons/$$(basename $$python); \
	  $(BIN)/uv venv -q --clear --python $$python $$venv && \
	  $(BIN)/uv pip install -q --python $$venv/bin/python 'torch==$(TORCH)' "$$(ls dist/release/$(TARGET)/*.whl)[dev,torchft,cli]" && \
	  $$venv/bin/python -m pytest -q -p no:cacheprovider $(PYTHONS_ARGS) || exit 1; \
	done

.PHONY: demo
demo: build ## heal a real torchft job, first with torchft's transport, then with ours
	$(BIN)/python examples/heal/story.py

.PHONY: demo-fleet
demo-fleet: build ## five replicas of a torchft job start, two are killed: who sends how much to whom
	$(BIN)/python examples/heal/fleet_story.py

.PHONY: demo-reshard
demo-reshard: build ## a job of four ranks feeds a job of two, live, with the optimizer
	$(BIN)/python examples/reshard/live_reshard.py

.PHONY: demo-restart
demo-restart: build ## a killed trainer comes back on the state that its node's keeper holds
	$(BIN)/python examples/restart/story.py

.PHONY: demo-megatron
demo-megatron: build ## Megatron's GPT changes its parallel layout, live and from files, and trains on
	PYTHONPATH=$(VENV)/megatron-$(lastword $(MEGATRON)) $(BIN)/python -W ignore examples/megatron/layouts.py

# What the tests run against: built without link-time optimisation, and its dependencies once for the wheel and for the
# tests of the crates, which the features of the binding's dependencies make the same.
CRATES := -p tensorferry-py -p tensorferry-core -p tensorferry-wire
$(VENV)/.under-test: $(RUST_SOURCES) $(PY_SOURCES) pyproject.toml README.md | $(VENV)/.deps
	rm -rf $(VENV)/.linked $(VENV)/.installed build/under-test
	cargo test --quiet --locked --profile ci --no-run $(CRATES)
	$(BIN)/maturin build --profile ci --quiet --out build/under-test --interpreter $(BIN)/python
	$(BIN)/python tests/project/check_wheel.py build/under-test
	$(BIN)/uv pip install -q --python $(BIN)/python --reinstall --no-deps build/under-test/*.whl
	touch $@

# Most tests wait, for other processes or for time-outs: hence more workers than cores. The tests of a Python file stay in
# one worker, and tests/conftest.py says which files come first. What fails runs once more, without other tests beside it:
# both results are printed, and a test that passes then is one to mend.
WORKERS ?= 3
PYTEST = -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder
.PHONY: test
test: $(VENV)/.under-test ## what a change needs: the tests of both languages, without those of the night
	$(MAKE) --no-print-directory -j2 test-python test-crates

.PHONY: test-python
test-python: $(VENV)/.under-test
	$(BIN)/python $(PYTEST) -m 'not nightly' $(PYTEST_ARGS) || (test $$? = 1 && $(AGAIN))
AGAIN = echo '==== once more, without other tests beside them ====' && \
  $(BIN)/python -m pytest --last-failed --last-failed-no-failures none --maxfail 10 $(PYTEST_ARGS)

.PHONY: test-crates
test-crates: $(VENV)/.under-test ## the tests of the crates
	mkdir -p build
	RUST_TEST_THREADS=6 nice -n 5 rust/test.sh --profile ci $(CRATES) >build/crates.log 2>&1; \
	  status=$$?; cat build/crates.log; exit $$status

# Each attack more often than `make test` makes it, with the wheel that is released. A failure blocks a release, not a
# change; -k goes on after one, so that the night tells them all.
OFTEN := --kills 25 --saver-kills 10 --saves 100 --keeper-kills 10 --pull-kills 10 --convert-kills 10 --object-kills 50 \
  --fault-schedules 25 --every-verb --fuzz-runs 500 --pickle-seconds 30 --pickled-states 500 --spread-states 100
.PHONY: test-all
test-all: export SWARM_SCHEDULES = 50
test-all: build object-stores ## every test, as once a night and before a release: hours
	$(MAKE) --no-print-directory -k night-python test-crates night-fuzz torchft-nightly compat wheel sdist pythons

.PHONY: night-python night-fuzz
night-python:
	$(BIN)/python $(PYTEST) $(OFTEN) --timeout 1800 $(PYTEST_ARGS)
night-fuzz:
	$(MAKE) --no-print-directory fuzz FUZZ_SECONDS=60

.PHONY: quick
# The tests make stores that do not answer, and torch prints the stack of each failure from threads of its own.
quick: export TORCH_CPP_LOG_LEVEL = FATAL
quick: dev ## make dev, and what starts no process and waits for nothing: for every change
	$(MAKE) --no-print-directory -j2 quick-python quick-crates

.PHONY: quick-python quick-crates
quick-python:
	$(BIN)/python $(PYTEST) -q -m 'not nightly and not process and not slow and not waits' $(PYTEST_ARGS)
quick-crates:
	RUST_TEST_THREADS=6 cargo test --quiet --locked -p tensorferry-core -p tensorferry-wire --lib --test formats

.PHONY: test-frameworks
test-frameworks: build ## the tests inside torchtitan, Lightning, accelerate and torchft's Manager
	$(BIN)/python $(PYTEST) tests/frameworks $(PYTEST_ARGS)

# Its folder comes before the packages of .venv: what is tested is the nightly, whatever release is installed there.
.PHONY: torchft-nightly
NIGHTLY_ARGS ?=
torchft-nightly: build ## torchft's newest nightly: its own tests with our transport in place of its own, and heals inside its Manager
	rm -rf $(VENV)/torchft-nightly
	$(BIN)/uv pip install -q --python $(BIN)/python --no-deps --target $(VENV)/torchft-nightly torchft-nightly
	ls -d $(VENV)/torchft-nightly/*.dist-info
	PYTHONPATH=$(CURDIR)/$(VENV)/torchft-nightly $(BIN)/python -m pytest -q -p no:cacheprovider tests/transport/torchft_suites \
	  tests/frameworks/test_manager.py tests/examples/test_heal.py $(NIGHTLY_ARGS)

.PHONY: fuzz
FUZZ_SECONDS ?= 5
fuzz: ## run each fuzz target for FUZZ_SECONDS seconds, or with FUZZ_RUNS=10000000 on so many inputs
	rust/fuzz/run.sh $(FUZZ_SECONDS)

.PHONY: lint
lint: ## formatters, clippy, ruff, mypy, stubtest, the rules of imports and the links of the docs, side by side
	$(MAKE) --no-print-directory -j3 --output-sync=target lint-rust lint-python lint-stubs docs

.PHONY: lint-rust
lint-rust: ## rustfmt and clippy
	cargo fmt --all --check
	cargo clippy --locked --profile ci --workspace --all-targets -- -D warnings

.PHONY: lint-python
lint-python: $(VENV)/.deps ## ruff, import-linter and mypy
	$(BIN)/ruff format --check python tests benches examples docs/*.py
	$(BIN)/ruff check python tests benches examples docs/*.py
	PYTHONPATH=python $(BIN)/lint-imports --no-logo
	$(BIN)/mypy

# It looks at the native module alone, of whichever build is installed; where none is, as in CI, of the one for the tests.
.PHONY: lint-stubs
lint-stubs: $(if $(wildcard $(VENV)/.linked),dev,$(if $(wildcard $(VENV)/.installed),build,$(VENV)/.under-test)) ## stubtest
	$(BIN)/python -m mypy.stubtest tensorferry._native --mypy-config-file pyproject.toml

.PHONY: format
format: $(VENV)/.deps ## rewrite the sources the way lint wants them
	cargo fmt --all
	$(BIN)/ruff format python tests benches examples docs/*.py
	$(BIN)/ruff check --fix python tests benches examples docs/*.py

.PHONY: docs
docs: $(VENV)/.deps ## the documentation as a site, in build/site
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

.PHONY: bench
BENCH_ARGS ?=
bench: build ## side by side against torchft's transports: one table, JSON and plot; BENCH_ARGS=--full for all there is
	$(BIN)/python benches/side_by_side.py --json build/bench/results.json --plot docs/bench.png $(BENCH_ARGS)

.PHONY: bench-fleet
BENCH_FLEET_ARGS ?=
bench-fleet: build ## one source and up to 8 receivers on shaped links, beside torchft's transport: table and JSON; needs root
	$(BIN)/python benches/fleet.py --json build/bench/fleet.json $(BENCH_FLEET_ARGS)
	$(BIN)/python benches/fleet_hosts.py --json build/bench/fleet_hosts.json

.PHONY: bench-replicas
bench-replicas: build ## a heal that every healthy replica sends to, beside one source, on shaped links: table and JSON; needs root
	$(BIN)/python benches/replicas.py --json build/bench/replicas.json $(BENCH_REPLICAS_ARGS)

.PHONY: bench-shared-reads
bench-shared-reads: build ## ranks that load the same state with PeerReader, on shaped links: table and JSON; needs root
	$(BIN)/python benches/shared_reads.py --json build/bench/shared_reads.json $(BENCH_SHARED_READS_ARGS)

.PHONY: bench-rails
BENCH_RAILS_ARGS ?=
bench-rails: build ## receives over several links between hosts, some of them broken: share of what they carry; needs root
	$(BIN)/python benches/rails.py --faults $(BENCH_RAILS_ARGS)
	$(BIN)/python benches/rails.py --links 100,400 --kinds rails,ours,torchft $(BENCH_RAILS_ARGS)
	$(BIN)/python benches/rails.py --sources 2 --kinds rails $(BENCH_RAILS_ARGS)
	$(BIN)/python benches/rails.py --sources 2 --links 100,100,400,400 --kinds rails $(BENCH_RAILS_ARGS)
	$(BIN)/python benches/rails.py --ranks 4 --kinds rails,ours $(BENCH_RAILS_ARGS)

.PHONY: bench-scale
BENCH_SCALE_ARGS ?=
bench-scale: build ## rates and CPU time over 1 to 16 lanes, sockets and shared memory, beside as many raw sockets: table and JSON
	$(BIN)/python benches/scale.py --json build/bench/scale.json $(BENCH_SCALE_ARGS)

.PHONY: bench-long-link
BENCH_LONG_LINK_ARGS ?=
bench-long-link: build ## over lanes, the share of a long, fast link that a receive uses: table; needs root
	$(BIN)/python benches/long_link.py $(BENCH_LONG_LINK_ARGS)

.PHONY: bench-dcp
BENCH_DCP_ARGS ?=
bench-dcp: build ## checkpoints beside torch's, Hugging Face's and torch.save, interleaved: table and JSON
	$(BIN)/python benches/dcp.py --json build/bench/dcp.json $(BENCH_DCP_ARGS)

.PHONY: bench-planning
BENCH_PLANNING_ARGS ?=
bench-planning: build ## what planning costs a coordinator, beside torch's planner and writer, in one process: table and JSON
	$(BIN)/python -W ignore benches/planning.py --json build/bench/planning.json $(BENCH_PLANNING_ARGS)

.PHONY: bench-checkpointing
BENCH_CHECKPOINTING_ARGS ?=
bench-checkpointing: build ## checkpointers beside torch's and torch_checkpointing, interleaved: table and JSON
	$(BIN)/uv pip install -q --python $(BIN)/python --no-deps 'torch_checkpointing==0.1.1'
	$(BIN)/python benches/checkpointing.py --json build/bench/checkpointing.json $(BENCH_CHECKPOINTING_ARGS)

# Two of the contenders need an older botocore than moto does.
OBJECT_CLIENTS := s3fs==2026.9.0 aiobotocore==3.10.0 botocore==1.43.117 aioitertools==0.13.0 s3torchconnector==1.5.0 s3torchconnectorclient==1.5.0 tenacity==9.1.2
.PHONY: bench-objects
BENCH_OBJECTS_ARGS ?=
bench-objects: build object-stores ## checkpoints in object stores beside s3fs, s3torchconnector and obstore by hand: tables and JSON
	$(BIN)/uv pip install -q --python $(BIN)/python --no-deps --target $(VENV)/object-clients $(OBJECT_CLIENTS)
	PYTHONPATH=$(VENV)/object-clients $(BIN)/python benches/objects.py --json build/bench/objects.json $(BENCH_OBJECTS_ARGS)

.PHONY: bench-megatron
BENCH_MEGATRON_ARGS ?=
bench-megatron: build ## Megatron's sharded state beside Megatron's own strategies: tables and JSON
	PYTHONPATH=$(VENV)/megatron-$(lastword $(MEGATRON)) $(BIN)/python -W ignore benches/sharded.py \
	  --json build/bench/megatron.json $(BENCH_MEGATRON_ARGS)

.PHONY: bench-accelerator
bench-accelerator: build ## copies between an accelerator and the network, beside plain copies; needs an accelerator
	$(BIN)/python benches/accelerator.py $(BENCH_ARGS)

.PHONY: faults
FAULTS_ARGS ?=
faults: build ## the fault matrix, ours beside torchft's HTTPTransport; FAULTS_ARGS='--repeats 20'
	PYTHONPATH=tests $(BIN)/python -m faults --transports tensorferry,torchft $(FAULTS_ARGS)

.PHONY: compat
compat: ## every Python test on the oldest torch that is supported
	$(MAKE) --no-print-directory compat-python VENV=.venv-compat TORCH=$(COMPAT_TORCH)

.PHONY: compat-python
compat-python: $(VENV)/.under-test
	$(BIN)/python $(PYTEST) $(PYTEST_ARGS)

.PHONY: clean
clean: ## remove everything that was built
	rm -rf target dist build .venv .venv-compat rust/fuzz/target
