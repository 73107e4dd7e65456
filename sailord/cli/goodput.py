"""The command ``sailorctl goodput``."""

from sailord.cli.server import question
from sailord.text.goodput_text import goodput_text

goodput = question(
    "goodput", goodput_text, "Show what every paid second of every GPU was spent on, and dollars."
)
