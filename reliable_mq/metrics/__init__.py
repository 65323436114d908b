"""Prometheus metrics.

:mod:`~reliable_mq.metrics.publisher` and :mod:`~reliable_mq.metrics.consumer` list them by name.
"""
