"""A protection domain of ordinary memory, for tests of what registers: it counts."""

import errno
from types import SimpleNamespace
from typing import Any

from aiordma import Access
from aiordma.verbs import Resource
from tests.internals import ffi


class PlainDomain(Resource):
    """Registers by numbering. `registered` is what has not been deregistered yet, by lkey."""

    def __init__(self) -> None:
        super().__init__()
        self.pointer = ffi.NULL
        self.context = SimpleNamespace(query=lambda: SimpleNamespace(vendor_id=0))
        self.provider = SimpleNamespace(reg_mr=self._register, dereg_mr=self._deregister)
        self.registered: dict[int, tuple[int, int, Access]] = {}
        self.history: list[str] = []
        self.refuse = 0
        self.refuse_deregistration = 0
        self.count = 0

    def _register(self, _domain: Any, start: Any, length: int, access: Access) -> Any:
        if self.refuse:
            ffi.errno = self.refuse
            return ffi.NULL
        self.count += 1
        region = ffi.new("struct ibv_mr *")
        region.lkey, region.rkey = self.count, self.count + 1000
        self.registered[self.count] = (int(ffi.cast("uintptr_t", start)), length, access)
        self.history.append(f"register {self.count}")
        return region

    def _deregister(self, region: Any) -> int:
        if self.refuse_deregistration:
            return self.refuse_deregistration
        if self.registered.pop(region.lkey, None) is None:
            return errno.EINVAL
        self.history.append(f"deregister {region.lkey}")
        return 0

    def _destroy(self) -> None:
        assert not self.registered
        self.history.append("destroy the domain")
