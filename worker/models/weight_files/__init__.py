"""Names and files of other programs' weights."""
