"""The agent's decisions, pure: (state, event) to (state, commands)."""
