"""The cloud's metadata server, and the notices that it gives."""
