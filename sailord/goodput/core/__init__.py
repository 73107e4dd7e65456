"""Pure accounting: from what sailord sees at each moment to sums by cause."""
