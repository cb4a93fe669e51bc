"""Take screenshots of the built documentation site: light and dark, wide and narrow.

    make docs
    .venv/bin/python docs/site/screenshots.py [PAGE...]

A PAGE is a name such as `index` or `reference/options`; without any, a selection is taken. The
pictures are in build/docs/screenshots. It needs Debian's package chromium-headless-shell, or
chromium, and opens no page but the site's own files.
"""

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
HTML = ROOT / "build" / "docs" / "html"
PICTURES = ROOT / "build" / "docs" / "screenshots"
PAGES = (
    "index",
    "install",
    "concepts",
    "tutorial",
    "choosing",
    "verbs",
    "verbs-examples",
    "errors",
    "reference/index",
    "reference/options",
    "reference/connection",
)
SCHEMES = {"dark": 0, "light": 1}
"""Values of Blink's setting preferredColorScheme."""
SIZES = {"wide": (1440, 1800), "narrow": (390, 1800)}
BROWSERS = ("chromium-headless-shell", "chromium")
SECONDS = 60


def main() -> int:
    """Take the pictures, and return the exit status."""
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        print("there is no chromium here: apt install chromium-headless-shell", file=sys.stderr)
        return 1
    pages = sys.argv[1:] or PAGES
    missing = [page for page in pages if not (HTML / f"{page}.html").is_file()]
    if missing:
        print(f"not built: {', '.join(missing)}: make docs", file=sys.stderr)
        return 1
    PICTURES.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as profile:
        for page in pages:
            for scheme, number in SCHEMES.items():
                for size, (width, height) in SIZES.items():
                    target = PICTURES / f"{page.replace('/', '-')}-{scheme}-{size}.png"
                    # Without the sandbox, which root cannot have: the pages are our own.
                    options = (
                        "--headless",
                        "--no-sandbox",
                        "--disable-gpu",
                        "--hide-scrollbars",
                        f"--user-data-dir={profile}",
                        f"--blink-settings=preferredColorScheme={number}",
                        f"--window-size={width},{height}",
                        f"--screenshot={target}",
                    )
                    subprocess.run(
                        [browser, *options, (HTML / f"{page}.html").as_uri()],
                        check=True,
                        capture_output=True,
                        timeout=SECONDS,
                    )
                    print(target.relative_to(ROOT))
    return 0


if __name__ == "__main__":
    sys.exit(main())
