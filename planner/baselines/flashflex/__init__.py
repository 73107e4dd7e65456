"""FlashFlex, as published, as a baseline."""
