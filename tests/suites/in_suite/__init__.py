"""What runs inside the process of another project's tests. It imports nothing of our own tests,
because those projects have a package `tests`, too."""
