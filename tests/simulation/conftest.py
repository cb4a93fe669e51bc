"""The fixture of the plugin, which the project's own tests leave out."""

from aiordma.testing.plugin import rdma_simulated

__all__ = ("rdma_simulated",)
