"""Containers for tasks that cannot run without an image of their own."""
