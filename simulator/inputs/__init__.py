"""Job and plan files, and checks of a plan against its job and cluster."""
