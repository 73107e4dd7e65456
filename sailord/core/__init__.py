"""The controller's decisions, pure: (state, event) to (state, commands)."""
