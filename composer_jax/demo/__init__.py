"""What only the CPU demo needs: its task families, scripted experts, exercises, copy curriculum and initialiser.

Nothing else in the library imports this package: a config names its parts by import path. Deleting the folder leaves
everything but the demo's configs working.
"""
