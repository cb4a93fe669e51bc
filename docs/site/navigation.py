"""The order of the documentation's pages, which is the site's table of contents."""

__all__ = ("NAVIGATION",)

NAVIGATION: dict[str, tuple[str, ...]] = {
    "Start": ("install", "concepts", "tutorial", "choosing", "examples"),
    "Use": (
        "messages",
        "one-sided",
        "streams",
        "dask",
        "valkey",
        "datagrams",
        "shared-receive",
        "memory",
        "back-pressure",
        "errors",
        "dead-peers",
        "threads",
        "shutdown",
        "testing",
        "faq",
    ),
    "Run": (
        "command-line",
        "devices",
        "observability",
        "security",
        "performance",
        "tuning",
        "containers",
    ),
    "Moving from": ("from-asyncio", "from-zeromq", "from-pyverbs", "from-ucx", "c-programs"),
    "Reference": (
        "reference/index",
        "environment",
        "verbs",
        "verbs-examples",
        "connection-manager",
        "guarantees",
        "fault-model",
        "glossary",
        "changelog",
    ),
    "Inside": (
        "design",
        "software-device",
        "hot-path",
        "benchmarks",
        "benchmark-results",
        "streams-suites",
        "post-mortems/index",
    ),
}
