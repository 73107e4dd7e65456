"""What cures a trouble, where several places say it."""

from __future__ import annotations

SPEND_MORE = "raise it with sailorctl budget JOB USD, and resume the job"
