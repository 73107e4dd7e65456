"""A worker process under its agent, from one generation to the next."""
