"""Texts that agents are prompted with, one per file."""
