"""``sailorctl ca``: the cluster's certificate authority."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from sailord.cli.shared.errors import Group
from sailord.cli.shared.options import FILE, JSON, FiniteRange, show
from sailord.text.table import table
from sailord.text.units import timestamp
from simulator.documents.problems import InputError, Problem, Problems

if TYPE_CHECKING:
    from sailord.authority import Authority

FOLDER = click.option(
    "--folder",
    type=FILE,
    default=Path("/var/lib/sailor/ca"),
    show_default=True,
    help="The authority's folder.",
)
DAYS = click.option(
    "--days",
    type=FiniteRange(min=0, min_open=True, max=3650),
    default=7.0,
    show_default=True,
    help="How long the certificate is valid.",
)


@click.group("ca", cls=Group)
def ca() -> None:
    """Make, renew and revoke certificates of the cluster's authority.

    docs/security.md says when.
    """


@ca.command()
@click.option("--cluster", metavar="NAME", required=True, help="The cluster_name of all files.")
@FOLDER
def init(cluster: str, folder: Path) -> None:
    """Make an authority: its key, its certificate, and an empty list of revoked certificates."""
    from sailord.authority import Authority  # noqa: PLC0415 - slow to import

    Authority.create(folder, cluster)
    click.echo(f"made the authority of {cluster} in {folder}; copy ca.pem to all machines")


@ca.command()
@click.argument("member", metavar="ROLE/NAME")
@click.option(
    "--out", type=FILE, required=True, help="Folder for certificate.pem, key.pem, ca.pem."
)
@click.option(
    "--host", "hosts", multiple=True, help="An address or name of a store/NAME; may be repeated."
)
@DAYS
@FOLDER
def issue(member: str, out: Path, hosts: tuple[str, ...], days: float, folder: Path) -> None:
    """Make a key and a certificate for sailord/NAME, agent/NODE, user/NAME or store/NAME."""
    from sailord.authority import Authority  # noqa: PLC0415 - slow to import

    role, _, name = member.partition("/")
    owner = Authority.open(folder).issue(role, name, out, days=days, hosts=hosts)
    click.echo(f"wrote certificate.pem, key.pem, ca.pem and revoked.pem of {owner} to {out}")


@ca.command()
@click.argument("folders", metavar="FOLDER...", type=FILE, nargs=-1, required=True)
@click.option(
    "--now", "is_forced", is_flag=True, help="Also where more than a third of the life is left."
)
@DAYS
@FOLDER
def renew(folders: tuple[Path, ...], is_forced: bool, days: float, folder: Path) -> None:
    """Renew certificates with less than a third of their life left; for a timer.

    Each FOLDER is one that `issue` wrote. Its copy of revoked.pem is renewed in any case. One that
    cannot be renewed keeps no other from it.
    """
    from sailord.authority import Authority  # noqa: PLC0415 - slow to import

    authority, problems = Authority.open(folder), Problems()
    for each in folders:
        try:
            click.echo(_renew(authority, each, days, is_forced=is_forced))
        except InputError as error:
            problems.take(error)
    problems.raise_if_any()


def _renew(authority: Authority, folder: Path, days: float, *, is_forced: bool) -> str:
    """Renew one folder if it is due; return what was done."""
    from agents.rpc.certificates import is_pair, share_of_life_left  # noqa: PLC0415 - slow to import
    from agents.rpc.enrolment import RENEW_AT  # noqa: PLC0415 - slow to import
    from agents.rpc.tls import read_certificate  # noqa: PLC0415 - slow to import
    from sailord.authority import CERTIFICATE, KEY, hosts_of  # noqa: PLC0415 - slow to import

    path = folder / CERTIFICATE
    owner, _ = read_certificate(path)
    last = authority.last_of(owner.uri)
    if last is None or last.revoked is not None:
        what = f"{owner} " + ("was not issued here" if last is None else "is revoked")
        cure = f"make another: sailorctl ca issue {owner} --out {folder}"
        raise InputError(Problem(str(folder), what, cure))
    # A crash in the middle of a renewal leaves a key that does not fit its certificate.
    is_due = share_of_life_left(path) < RENEW_AT or not is_pair(path, folder / KEY)
    if is_forced or is_due:
        authority.issue(owner.role, owner.name, folder, days=days, hosts=hosts_of(path))
        return f"renewed {owner} in {folder}"
    authority.copy_public(folder)
    return f"{owner} in {folder} is not due"


@ca.command()
@click.argument("which", metavar="ROLE/NAME|SERIAL")
@click.option("--may-return", is_flag=True, help="The node may enrol again under this name.")
@FOLDER
def revoke(which: str, may_return: bool, folder: Path) -> None:
    """Revoke a member's certificates, or one by its serial number."""
    from sailord.authority import Authority  # noqa: PLC0415 - slow to import

    ended = Authority.open(folder).revoke(which, may_return=may_return)
    many = f"{len(ended)} certificate{'s' if len(ended) > 1 else ''}"
    click.echo(f"revoked {many} of {ended[0].owner}; copy revoked.pem to machines without enrol")


@ca.command("list")
@FOLDER
@JSON
def list_(folder: Path, as_json: bool) -> None:
    """List what was issued, and until when it is valid."""
    from sailord.authority import Authority  # noqa: PLC0415 - slow to import

    now = time.time()
    rows = [
        {"member": str(each.owner), "serial": each.serial, "until": each.until,
         "state": each.state(now)}
        for each in Authority.open(folder).issued()
    ]  # fmt: skip
    show(rows, as_json, _text)


def _text(rows: list[dict[str, Any]]) -> str:
    if not rows:
        return "no certificates yet"
    shown = [[row["member"], row["state"], timestamp(row["until"]), row["serial"]] for row in rows]
    return table(["member", "state", "until", "serial"], shown)
