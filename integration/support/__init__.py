"""What the integration tests stand on: real brokers in containers, and the accounts that are kept of what they did."""
