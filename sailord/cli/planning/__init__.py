"""Commands that need no running cluster: plan, compare, replay, simulate."""
