"""Where machines come from: one small interface, and those who speak it."""
