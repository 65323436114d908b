"""The decisions: no socket, no clock, no thread, no logging.

`engine`, `sync` and `aio` carry them out.
"""
