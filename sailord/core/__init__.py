"""All decisions about nodes and jobs, pure: (state, event) to (state, commands)."""
