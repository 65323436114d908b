"""Support code for the integration tests: servers in containers, clients, audits."""
