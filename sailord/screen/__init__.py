"""The screen of ``sailorctl up`` and ``status -w``: pure views, and the terminal."""
