"""What both daemons share: clock, logs, systemd, state folder, fail points."""
