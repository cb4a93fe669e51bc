"""`make soak`: many connections, messages and loops on the software device, for minutes.

`python -m tests.soak [PART ...]` runs the parts, each in a process of its own (`parts.py` lists
them), prints a table of their figures, and writes them to build/soak.json. SOAK_SCALE, a factor,
makes all sizes smaller or larger. docs/benchmark-results.md has some figures of a run.
"""
