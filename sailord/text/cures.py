"""Cures of problems, as sentences that several texts share."""

from __future__ import annotations


def spend_more(job: str, usd_needed: float | None = None) -> str:
    """Return what ends the hold of a job whose budget is spent; a known sum until its end helps."""
    end = "" if usd_needed is None else f" (about ${usd_needed:,.2f} in all until its end)"
    return f"raise it with sailorctl budget {job} USD{end}, then sailorctl resume {job}"
