"""Release of weights: a gate, a canary by users, a file per release, and the way back. Works without JAX."""
