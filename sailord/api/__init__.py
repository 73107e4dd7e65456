"""The HTTP interface: requests of people and programs, reports of agents, webhooks."""
