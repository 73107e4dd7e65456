#!/bin/sh
# Tells the agent by SIGPWR, before it is stopped, if the whole machine shuts down.
# Run as root, which may ask systemd itself; its message bus may have ended by then.
[ "$(systemctl is-system-running)" != stopping ] || kill -s PWR "$1"
