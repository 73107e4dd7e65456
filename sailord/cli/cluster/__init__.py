"""Commands that ask a running sailord, or give it orders."""
