"""The GPUs of a node: found, tested, monitored."""
