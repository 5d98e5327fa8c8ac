"""Memory and time of a config's programs on a slice of TPUs, computed without the slice.

Memory comes from XLA's own compiler, time from a roofline of the traced program.
"""
