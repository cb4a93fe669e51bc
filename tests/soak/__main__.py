"""Run the soak: python -m tests.soak [PART ...]"""

import json
import os
import platform
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from .figures import SCALE, Figure
from .parts import PARTS

ROOT = Path(__file__).resolve().parents[2]
RESULTS = Path(os.environ.get("SOAK_RESULTS", ROOT / "build" / "soak.json"))
PART_SECONDS = 900


@dataclass
class _Part:
    figures: list[Figure]
    seconds: float
    failed: bool
    """Whether it ended without figures."""

    @property
    def missed(self) -> bool:
        return self.failed or not all(each.met for each in self.figures)


def main(*names: str) -> int:
    """Run parts in processes of their own; print and write their figures. Return the status."""
    unknown = set(names) - set(PARTS)
    if unknown:
        print(f"no such part: {', '.join(sorted(unknown))}; the parts are {', '.join(PARTS)}")
        return 2
    load = os.getloadavg()
    found = {name: _run(name) for name in names or PARTS}
    RESULTS.parent.mkdir(parents=True, exist_ok=True)
    machine = {
        "scale": SCALE,
        "processors": len(os.sched_getaffinity(0)),
        "load": {"before": load, "after": os.getloadavg()},
        "kernel": platform.release(),
        "python": platform.python_version(),
    }
    parts = {name: asdict(part) | {"missed": part.missed} for name, part in found.items()}
    RESULTS.write_text(json.dumps({"machine": machine, "parts": parts}, indent=1))
    print(f"\nwritten to {RESULTS}; load {load[0]:.1f} before, {os.getloadavg()[0]:.1f} after")
    return int(any(part.missed for part in found.values()))


def _run(name: str) -> _Part:
    what = (PARTS[name].__doc__ or "").split("\n")[0]
    print(f"\n{name}: {what}", flush=True)
    words = [sys.executable, "-m", "tests.soak.parts", name]
    began = time.perf_counter()
    with subprocess.Popen(words, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        try:
            output, _ = process.communicate(timeout=PART_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            output, _ = process.communicate()
            print(f"  did not end within {PART_SECONDS} s")
    seconds = time.perf_counter() - began
    *examples, last = output.splitlines() or [""]
    for line in examples:
        print(f"  {line}")
    if process.returncode:
        print(f"  FAILED: status {process.returncode}")
        return _Part([], seconds, failed=True)
    figures = [Figure(**each) for each in json.loads(last)]
    for figure in figures:
        print(_line(figure))
    print(f"  {seconds:.0f} s", flush=True)
    return _Part(figures, seconds, failed=False)


def _line(figure: Figure) -> str:
    goal = "" if figure.goal is None else f"{figure.goal[0]} {figure.goal[1]:g}"
    verdict = "" if figure.met else "MISSED"
    value = f"{figure.value:,.0f}" if figure.value >= 100 else f"{figure.value:g}"
    return f"  {figure.name:56} {value:>12}   {goal:10} {verdict}".rstrip()


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
