"""Source trees, git repositories and rows of text -> shards of token ids, filtered and without duplicates.

`prepare` (prepare.py) cuts the sources into units of a few megabytes (plan.py), reads and filters every unit
(filter_unit.py), finds duplicates over all units (duplicates.py), and writes the tokens of every unit into a shard
(tokenize_unit.py). Each step is saved, and the result depends on the sources and the config only, not on the number of
workers or on interruptions. `data/prepared.py` reads the shards.
"""
