"""The decisions of the package, without sockets, clocks, threads or logging.

`engine`, `sync` and `aio` carry them out.
"""
