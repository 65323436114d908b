"""Alerts, dashboards and the depths of queues, for Prometheus and Grafana."""

from reliable_mq.monitoring.queue_depths import QueueDepths

__all__ = ["QueueDepths"]
