"""Python imports this in the processes that tests of distributed's suite start."""

from in_suite.dask import substitute  # type: ignore[import-not-found]

substitute()
