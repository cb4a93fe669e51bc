"""`python -m aiordma` is the command `aiordma`."""

from aiordma.cli.main import main

__all__ = ()

if __name__ == "__main__":
    main()
