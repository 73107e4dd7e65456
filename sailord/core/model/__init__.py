"""The nouns of the core: the state and its parts, events, commands, and answers of rules."""
