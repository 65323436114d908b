"""Reconnecting connections, for both APIs.

`connection.Connector` runs on the event loop of either driver. Only the packages ``pika_driver`` and ``aiormq_driver``
import a driver. No module of this package starts an I/O thread.
"""
