"""What the Cloud Billing catalogue says, and what is done where it says nothing.

Without a price nothing is ever rented. So whoever may not read that catalogue has the prices of
the built-in one and of a file of their own, and a word on what to do.
"""

from __future__ import annotations

from typing import Any

import structlog

from sailord.providers.gce.client import LOGIN, Api
from sailord.providers.gce.config import GceConfig
from sailord.providers.gce.errors import Failure
from sailord.providers.gce.prices import SERVICE, Rates, rates_of
from simulator.documents.problems import Problem

log = structlog.get_logger("sailord")


class Billing:
    """The rates as they were last read."""

    def __init__(self, api: Api, config: GceConfig) -> None:
        self._api = api
        self._config = config
        self._rates: Rates | None = None
        self._trouble: Problem | None = None

    async def rates(self) -> Rates | None:
        """Read them, if the file wants it; where that fails the last ones stay, and it is told."""
        before = self._trouble
        self._trouble = await self.read()
        if self._trouble is not None and self._trouble != before:
            log.warning(
                "prices are not those of the Cloud Billing catalogue", error=str(self._trouble)
            )
        elif self._trouble is None and before is not None:
            log.info("the Cloud Billing catalogue is read again")
        return self._rates

    async def read(self) -> Problem | None:
        """Read the rates anew; return why they could not be read."""
        if not self._config.billing:
            return None
        try:
            self._rates = rates_of(await self._skus())
        except Failure as failure:
            return self._said(failure)
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

    def _said(self, failure: Failure) -> Problem:
        prices = "the built-in catalogue and your own" if self._rates is None else "the last answer"
        what = f"cannot be read ({failure.text}): prices are those of {prices}"
        if failure.kind != "permission":
            cure = "it is asked again every few minutes"
        elif failure.status == 401:
            cure = LOGIN
        else:
            enable = "gcloud services enable cloudbilling.googleapis.com"
            cure = f"{enable} --project={self._config.project}, or leave billing out"
        return Problem("provider.billing", what, cure)
