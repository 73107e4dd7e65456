"""``import sailor``: what a user's script gives, and how it is run."""
