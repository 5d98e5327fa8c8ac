"""Mesh, the one logical-axis table, and what moves between devices."""
