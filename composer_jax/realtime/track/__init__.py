"""The client on a user's machine: what became of an agent's changes in a git working tree, as counts and hashes.

tracker.py is what launch.track calls. working_tree.py reads git, session_diff.py says which lines a session changed,
kept_lines.py how many are still so, by the alignment in token_alignment.py; event_sender.py sends the counts.
"""
