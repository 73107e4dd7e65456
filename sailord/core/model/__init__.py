"""What the core talks about: the state and its parts, events, commands, and what a rule answers."""
