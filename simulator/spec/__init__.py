"""The nouns of every question: job, plan, and where a number comes from."""
