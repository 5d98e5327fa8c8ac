"""What a run shows of itself: progress, metric files, episode files, plots and the report.

The lowest floor of the house: it imports no other part of composer_jax but the errors, and nothing here needs
JAX. Modules are imported by name, so that a training loop that only writes metrics does not load matplotlib.
"""
