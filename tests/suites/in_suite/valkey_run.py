"""Call tests/rdma/run.py of Valkey, as its main part does: python valkey_run.py RUN_PY ADDRESS.

Its main part looks for a device of the kernel, and for its address, which is given here.
"""

import sys
from importlib.util import module_from_spec, spec_from_file_location
from types import ModuleType

sys.modules["netifaces"] = ModuleType("netifaces")  # only the main part uses it
spec = spec_from_file_location("run", sys.argv[1])
assert spec is not None
assert spec.loader is not None
run = module_from_spec(spec)
spec.loader.exec_module(run)
sys.exit(run.build_program() or run.test_rdma(sys.argv[2]))
