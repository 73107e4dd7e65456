"""Where instances come from: Google Compute Engine, listed hosts, emulated ones, or a trace."""
