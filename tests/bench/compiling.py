"""The benchmark's own C, compiled when it is needed, into build/bench."""

import subprocess
from pathlib import Path

HERE = Path(__file__).resolve().parent
FOLDER = HERE.parents[1] / "build" / "bench"


def compiled(source: str, *options: str) -> Path:
    """Compile a file beside this one, unless that is done; return what came of it.

    Args:
        source: its name.
        options: more words for gcc; what follows the source's name in linking begins with -l.
    """
    path = HERE / source
    FOLDER.mkdir(parents=True, exist_ok=True)
    target = FOLDER / path.stem
    if target.exists() and target.stat().st_mtime > path.stat().st_mtime:
        return target
    libraries = [option for option in options if option.startswith("-l")]
    others = [option for option in options if not option.startswith("-l")]
    command = ["gcc", "-O2", "-Wall", "-Wextra", "-Werror", *others, str(path), *libraries]
    subprocess.run([*command, "-o", str(target)], check=True)
    return target
