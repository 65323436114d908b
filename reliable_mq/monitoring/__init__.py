"""Alerts, dashboards and queue depths for Prometheus and Grafana."""

from reliable_mq.monitoring.queue_depths import QueueDepths

__all__ = ["QueueDepths"]
