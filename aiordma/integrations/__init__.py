"""aiordma in other packages' places. Each module needs the package that it is named after."""

__all__ = ()
