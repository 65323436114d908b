"""Decisions of a consumer."""
