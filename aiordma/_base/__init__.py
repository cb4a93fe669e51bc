"""Values without input or output: enums, errors, options, states, addresses, the provider."""
