"""The benchmark's own C, compiled when it is needed, into build/bench."""

import subprocess
from collections.abc import Sequence
from pathlib import Path

HERE = Path(__file__).resolve().parent
NATIVE = HERE.parents[1] / "aiordma" / "_native"
FOLDER = HERE.parents[1] / "build" / "bench"


def compiled(source: str, *options: str, others: Sequence[Path] = ()) -> Path:
    """Compile a file beside this one, unless that is done; return what came of it.

    Args:
        source: its name.
        options: more words for gcc; what follows the sources' names in linking begins with -l.
        others: sources that it is linked with.
    """
    sources = [HERE / source, *others]
    FOLDER.mkdir(parents=True, exist_ok=True)
    target = FOLDER / sources[0].stem
    headers = NATIVE.rglob("*.h") if others else ()
    newest = max(path.stat().st_mtime for path in (*sources, *headers))
    if target.exists() and target.stat().st_mtime > newest:
        return target
    libraries = [option for option in options if option.startswith("-l")]
    words = [option for option in options if not option.startswith("-l")]
    command = ["gcc", "-O2", "-Wall", "-Wextra", "-Werror", *words, *map(str, sources), *libraries]
    subprocess.run([*command, "-o", str(target)], check=True)
    return target
