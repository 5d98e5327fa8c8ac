"""The device mesh and its processes.

mesh         the five axes and their sizes
sharding     the one table that maps logical axes of weights to mesh axes
context      rows divided over devices
dispatch     tokens to their experts and back
processes    several processes of one run; cluster_env finds them, failure ends them together
platform     settings of XLA's CPU client, and the compilation cache
"""
