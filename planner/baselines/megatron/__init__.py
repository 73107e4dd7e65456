"""The Megatron rule of thumb, as published, as a baseline."""
