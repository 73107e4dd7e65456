"""Reads prices from the Cloud Billing catalogue.

Where it cannot be read, the built-in catalogue and the user's own file still give prices, and a
warning names the cure.
"""

from __future__ import annotations

from typing import Any

import structlog

from sailord.providers.gce.client import LOGIN, GceClient
from sailord.providers.gce.config import GceConfig
from sailord.providers.gce.errors import GceError
from sailord.providers.gce.prices import SERVICE, Rates, rates_of
from simulator.documents.problems import Problem

log = structlog.get_logger("sailord")


class Billing:
    """The rates that were last read."""

    def __init__(self, api: GceClient, config: GceConfig) -> None:
        self._api = api
        self._config = config
        self._rates: Rates | None = None
        self._trouble: Problem | None = None

    async def rates(self) -> Rates | None:
        """Read the rates if configured; after a failure return the last ones, and warn once."""
        before = self._trouble
        self._trouble = await self.read()
        if self._trouble is not None and self._trouble != before:
            log.warning("cannot read the Cloud Billing catalogue", error=str(self._trouble))
        elif self._trouble is None and before is not None:
            log.info("the Cloud Billing catalogue can be read again")
        return self._rates

    async def read(self) -> Problem | None:
        """Read the rates; return the problem if that fails."""
        if not self._config.billing:
            return None
        try:
            self._rates = rates_of(await self._skus())
        except GceError as failure:
            return self._problem_of(failure)
        return None

    async def _skus(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = []
        url, token = f"{self._config.billing_endpoint}/v1/services/{SERVICE}/skus", ""
        while True:
            told = await self._api.get_json(url, {"currencyCode": "USD", "pageToken": token})
            found += told.get("skus", ())
            token = told.get("nextPageToken", "")
            if not token:
                return found

    def _problem_of(self, failure: GceError) -> Problem:
        prices = "the built-in catalogue and your own" if self._rates is None else "the last answer"
        what = f"cannot be read ({failure.text}): prices are those of {prices}"
        if failure.kind != "permission":
            cure = "retried every few minutes"
        elif failure.status == 401:
            cure = LOGIN
        else:
            enable = "gcloud services enable cloudbilling.googleapis.com"
            cure = f"{enable} --project={self._config.project}, or leave billing out"
        return Problem("provider.billing", what, cure)
