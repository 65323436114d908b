"""Prometheus metrics.

:mod:`~reliable_mq.metrics.families`, :mod:`~reliable_mq.metrics.families` and :mod:`~reliable_mq.metrics.families` list
them by name.
"""
