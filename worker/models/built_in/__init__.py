"""The model families that come with Sailor."""
