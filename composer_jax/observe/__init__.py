"""The output of a run for people: progress, metric files, episode files, plots and the report.

Every other package may import this one. Only compilations.py imports JAX, and only picture.py and plots.py import
matplotlib.
"""
