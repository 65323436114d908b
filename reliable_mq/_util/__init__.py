"""Helpers that are independent of messaging."""
