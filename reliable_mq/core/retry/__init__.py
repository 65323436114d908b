"""Retries and dead letters, as messages."""
