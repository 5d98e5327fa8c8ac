"""The output of a run for people: progress, metric files, episode files, plots and the report.

The lowest floor of the package. Only compilations.py imports JAX, and only picture.py and plots.py import matplotlib.
"""
