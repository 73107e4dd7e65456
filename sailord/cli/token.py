"""The command ``sailorctl token``: makes, lists and revokes tokens, on the head node."""

from __future__ import annotations

import time
from dataclasses import asdict
from pathlib import Path
from typing import cast

import click

from sailord.cli.shared.errors import Group
from sailord.cli.shared.options import FILE, JSON, FiniteRange, show
from sailord.text.table import table
from sailord.text.units import timestamp
from sailord.tokens import ROLES, Role, Token, create_token, read_tokens, revoke_token

PLACE = click.option(
    "--file",
    type=FILE,
    default=Path("/etc/sailor/tokens.json"),
    show_default=True,
    help="The file that sailord.toml names as tokens under [listen].",
)


@click.group(cls=Group)
def token() -> None:
    """Make, list and revoke tokens for people, on the head node."""


@token.command()
@click.argument("name")
@click.option("--role", type=click.Choice(ROLES), default="viewer", show_default=True)
@click.option("--days", type=FiniteRange(min=0, min_open=True, max=3650), default=90.0,
              show_default=True, help="It expires after so many days.")  # fmt: skip
@PLACE
def create(name: str, role: str, days: float, file: Path) -> None:
    """Make a token and print it: only its hash is kept."""
    click.echo(create_token(file, name, cast("Role", role), days))


@token.command("list")
@PLACE
@JSON
def list_tokens(file: Path, as_json: bool) -> None:
    """List the tokens."""
    known = read_tokens(file)
    said = [{k: v for k, v in asdict(each).items() if k != "sha256"} for each in known]
    show({"tokens": said}, as_json, lambda _: _text(known))


@token.command()
@click.argument("name")
@PLACE
def revoke(name: str, file: Path) -> None:
    """Revoke a token, at once."""
    revoke_token(file, name)
    click.echo(f"{name} is revoked")


def _text(known: tuple[Token, ...]) -> str:
    rows = [(each.name, each.role, _end(each)) for each in known]
    return table(("name", "role", "expires"), rows) if rows else "no tokens"


def _end(each: Token) -> str:
    if each.expires is None:
        return "never"
    end = timestamp(each.expires)
    return end if each.is_valid(time.time()) else f"expired {end}"
