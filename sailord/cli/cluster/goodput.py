"""The command ``sailorctl goodput``."""

from sailord.cli.shared.server import question
from sailord.text.goodput_text import goodput_text

goodput = question(
    "goodput", goodput_text, "Show what paid GPU time and money were spent on, by cause."
)
