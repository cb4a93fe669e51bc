"""Fuzzers of everything in the software device that reads a peer's bytes; `make fuzz` runs them."""
