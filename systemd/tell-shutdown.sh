#!/bin/sh
# Before the agent is stopped: tell it by SIGPWR if the whole machine shuts down. Run as root, which
# may ask systemd itself; its message bus may have ended by then.
[ "$(systemctl is-system-running)" != stopping ] || kill -s PWR "$1"
