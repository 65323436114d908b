"""Decisions of a publisher."""
