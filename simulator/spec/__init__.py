"""The basic types: job, plan, and the provenance of a number."""
