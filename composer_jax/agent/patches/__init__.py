"""Patches as models write them: unified diffs, and an envelope with file headers; and their application to a text."""
