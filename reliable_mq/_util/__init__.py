"""Helpers that know nothing of messaging."""
