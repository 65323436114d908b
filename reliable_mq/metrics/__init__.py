"""Prometheus metrics.

:mod:`~reliable_mq.metrics.publisher`, :mod:`~reliable_mq.metrics.outbox` and :mod:`~reliable_mq.metrics.consumer` list
them by name.
"""
