"""Decisions of the relay that moves a queue into a stream. No I/O."""
