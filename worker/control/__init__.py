"""A worker process under its agent, across generations."""
