"""The software device under gcc's sanitizers; `make sanitize` is the way in."""
