"""The screen of ``sailorctl up`` and ``status -w``: pure views of what was seen, and its edge."""
