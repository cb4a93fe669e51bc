"""Values without input or output: enums, errors, options, states, addresses, the provider."""

__all__ = ()
