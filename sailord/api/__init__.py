"""The HTTP API: requests of people and programs, reports of agents, webhooks, metrics."""
