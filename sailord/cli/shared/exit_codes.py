"""Exit codes of ``sailorctl``, the same for every command; ``sailorctl --help`` lists them."""

from __future__ import annotations

FAILED = 1
"""The command ran and failed: there is no plan, sailord refused, a check found a fault."""
UNUSABLE_INPUT = 2
"""An option or a file cannot be used; click uses the same code for wrong options."""
DOES_NOT_FIT = 3
"""``simulate``: the plan does not fit the memory of its devices."""
INTERRUPTED = 130
"""Ctrl-C while a command waits for sailord."""

TEXT = (
    "Exit codes: 0 success; 1 the command failed, or there is no plan; 2 an option or a file "
    "cannot be used; 3 the plan does not fit the memory of its devices (simulate); 130 Ctrl-C."
)
"""As ``sailorctl --help`` prints them."""
