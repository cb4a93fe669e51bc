"""The software device's engine thread, as Linux's scheduler counts it."""

import time
from pathlib import Path


class EngineThread:
    """The engine thread of this process. Needs a descriptor to open, and none afterwards."""

    def __init__(self) -> None:
        named = [
            task
            for task in Path("/proc/self/task").iterdir()
            if (task / "comm").read_text() == "aiordma-engine\n"
        ]
        (task,) = named
        self._status = (task / "status").open("rb", buffering=0)

    def close(self) -> None:
        self._status.close()

    def _fields(self) -> dict[str, str]:
        self._status.seek(0)
        lines = self._status.read().decode().splitlines()
        return dict(line.split(":\t", 1) for line in lines)

    @property
    def sleeps(self) -> int:
        """How often the thread has slept."""
        return int(self._fields()["voluntary_ctxt_switches"])

    def is_resting(self, seconds: float = 0.01) -> bool:
        """Whether the thread sleeps all this time."""
        found = []
        for _ in range(2):
            fields = self._fields()
            names = ("State", "voluntary_ctxt_switches", "nonvoluntary_ctxt_switches")
            found.append([fields[name] for name in names])
            time.sleep(seconds)
        return found[0] == found[1] and found[0][0].startswith("S")
