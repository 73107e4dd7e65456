"""Answers in JSON, and the one form that all refusals have."""

from __future__ import annotations

import json

from aiohttp import web

from agents.protocol.codec import plain
from sailord.api.answers.types import RequestProblems
from simulator.documents.problems import Problem

BODY_BYTES_MAX = 1 << 20


class Refusal(Exception):  # noqa: N818 - an expected answer, not a failure of ours
    """A handler refuses a request; ``response`` lists what is wrong and what to do."""

    def __init__(
        self, status: int, *problems: Problem, headers: dict[str, str] | None = None
    ) -> None:
        super().__init__("; ".join(map(str, problems)))
        self.response = refusal(status, *problems, headers=headers)


def answer(
    value: object, *, status: int = 200, headers: dict[str, str] | None = None
) -> web.Response:
    """A JSON response; ``value`` is one of ``types`` or plain."""
    text = json.dumps(plain(value), allow_nan=False)
    return web.Response(text=text, status=status, content_type="application/json", headers=headers)


def refusal(status: int, *problems: Problem, headers: dict[str, str] | None = None) -> web.Response:
    """A response that lists what is wrong and what to do."""
    return answer(RequestProblems(problems), status=status, headers=headers)


def too_many(what: str) -> Refusal:
    """A refusal with status 429."""
    problem = Problem(what, "too many at once", "retry in 1 s")
    return Refusal(429, problem, headers={"Retry-After": "1"})
