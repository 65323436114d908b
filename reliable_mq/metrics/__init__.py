"""Prometheus metrics; `reliable_mq.metrics.families` lists them by name."""
