"""Why a plan looks as it does, and why there is none."""
