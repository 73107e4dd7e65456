"""The commands of ``python -m worker``.

Exit codes: 0 success; 1 a rank failed or the output could not be written; 2 invalid input; 128 + n
ended by signal n.
"""

from __future__ import annotations

import io
import os
import signal
import sys
from pathlib import Path
from typing import Any

import click

from simulator.documents.problems import InputError, Problem
from worker.cli.local_launcher import Interrupted, RanksFailedError
from worker.cli.own_output import discard_output, printing_to_stderr

SOME_FAILED = 1
UNUSABLE_INPUT = 2


class _CommandGroup(click.Group):
    """Prints errors as sentences instead of stack traces."""

    def invoke(self, ctx: click.Context) -> object:
        if isinstance(sys.stdout, io.TextIOWrapper):
            # Ranks and we print to one stream: whole lines, also under PYTHONUNBUFFERED.
            sys.stdout.reconfigure(line_buffering=True, write_through=False)
        try:
            result = super().invoke(ctx)
            sys.stdout.flush()
            return result
        except InputError as error:
            for problem in error.problems:
                click.echo(f"error: {problem}", err=True)
            ctx.exit(UNUSABLE_INPUT)
        except RanksFailedError as error:
            click.echo(f"error: {error}", err=True)
            ctx.exit(SOME_FAILED)
        except Interrupted as interrupted:
            click.echo(f"ended by {interrupted}", err=True)
            ctx.exit(128 + interrupted.number)
        except BrokenPipeError:
            # The reader of our output has exited, as `| head` does.
            discard_output()
            ctx.exit(128 + signal.SIGPIPE)
        except OSError as error:
            # Input was checked before, so this is an output: a full disk, for example.
            where = error.filename or "the standard output"
            click.echo(f"error: {where}: cannot be written: {error.strerror or error}", err=True)
            discard_output()
            ctx.exit(SOME_FAILED)


@click.group(cls=_CommandGroup, context_settings={"help_option_names": ["-h", "--help"]})
def main() -> None:
    """Train a plan on this machine, or prepare data and checkpoints."""


@main.command()
@click.option("--job", required=True, type=click.Path(path_type=Path), help="Job file.")
@click.option("--plan", type=click.Path(path_type=Path), help="Plan file; default: one rank.")
@click.option("--resume", help="Checkpoint to continue from: a manifest, or a job's folder.")
@click.option("--steps", type=click.IntRange(1), help="Steps to train; default: the job's.")
@click.option(
    "--engine",
    type=click.Choice(["sailor", "deepspeed"]),
    help="Training engine; DeepSpeed needs identical pipelines. Default: the job's.",
)
@click.option(
    "--deepspeed-config", type=click.Path(path_type=Path), help="DeepSpeed's configuration (JSON)."
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object per step.")
@click.option("--timeline", type=click.Path(path_type=Path), help="Write a Perfetto trace.")
@click.option("--save", type=click.Path(path_type=Path), help="Folder for the trained weights.")
@click.option("--ranks-max", type=click.IntRange(1), help="Refuse plans of more ranks.")
@click.option("--device", type=click.Choice(["cpu", "cuda"]), help="Default: GPUs if enough.")
@click.argument("arguments", nargs=-1)
def run(**options: Any) -> None:
    """Train a job, with one process of this machine for each rank of the plan.

    ARGUMENTS, after --, are those of a job that is a script.

    Prints one line for each step; at the end, prints each rank's peak memory to stderr.
    """
    if signal.getsignal(signal.SIGINT) == signal.default_int_handler:
        # Nothing needs cleaning up yet, and importing torch cannot be interrupted safely.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from worker.cli.local_run import RunOptions, train_alone  # noqa: PLC0415 - loads torch, which takes seconds

    train_alone(RunOptions(**options))


@main.command()
@click.argument("script", type=click.Path(path_type=Path))
@click.option(
    "--workdir",
    type=click.Path(path_type=Path),
    help="Run it there, and name it relative to this folder.",
)
@click.argument("arguments", nargs=-1)
def describe(script: Path, workdir: Path | None, arguments: tuple[str, ...]) -> None:
    """Print the job of a script: its settings, and its model as a plan needs it.

    The script runs up to its train(). Of a job file that names a model of transformers
    ([model] hf), print it with the model's description. ``sailorctl submit`` does this by itself.
    """
    from simulator.documents.files import load_document  # noqa: PLC0415 - as below
    from worker.reporting.loggers import outputs_of  # noqa: PLC0415 - as below
    from worker.script.hf_job import described_job, names_hf  # noqa: PLC0415 - loads torch, which takes seconds
    from worker.script.job_text import described_text, job_text  # noqa: PLC0415 - the same
    from worker.script.load import load_script  # noqa: PLC0415 - the same

    if script.suffix != ".py":
        document = load_document(script, flaws_raise=False)
        if not names_hf(document):
            raise InputError(Problem(str(script), "has no [model] hf to be described"))
        with printing_to_stderr():
            job, recipe = described_job(document)
        _print_job(described_text(document, job), recipe.notes())
        return
    if workdir is None:
        script = script.absolute()
    else:
        script = script.resolve().relative_to(workdir.resolve())
        os.chdir(workdir)
    # What the script itself prints is not part of its job.
    with printing_to_stderr():
        recipe = load_script(script, arguments)
        text = job_text(recipe.job(), script)
    for name in outputs_of(recipe.loggers):
        click.echo(f"writes: {name}", err=True)
    _print_job(text, recipe.notes())


def _print_job(text: str, notes: list[str]) -> None:
    for note in notes:
        click.echo(f"note: {note}", err=True)
    click.echo(text, nl=False)


class _Numbers(click.ParamType[tuple[int, ...]]):
    """Numbers from 1 on, with commas between them."""

    name = "numbers"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[int, ...]:
        if isinstance(value, tuple):
            return value
        words = str(value).split(",")
        if not all(word.strip().isdecimal() and int(word) > 0 for word in words):
            self.fail(f"{value!r} is not a list such as 1,2,4", param, ctx)
        return tuple(int(word) for word in words)


@main.command()
@click.argument("job", type=click.Path(path_type=Path))
@click.option("--tp", type=_Numbers(), default=(), help="TP degrees; default: up to max_tp.")
@click.option("--micro-batches", type=_Numbers(), default=(), help="Default: 1, 2, 4 ... that fit.")
@click.option("--out", type=click.Path(path_type=Path), default=Path("profiles"), help="Folder.")
@click.option("--name", help="Of the profile; default: the job's, or the model's name.")
@click.option("--device", type=click.Choice(["cpu", "cuda"]), help="Default: a GPU if any.")
@click.option("--kind", help="The device's kind, if not by its name.")
@click.option("--catalogue", type=click.Path(path_type=Path), help="Your own facts of GPUs.")
@click.option("--budget", type=click.FloatRange(1), default=100.0, help="Seconds to measure.")
@click.option("--threads", type=click.IntRange(1), help="CPU threads; default: torch's.")
@click.option("--force", is_flag=True, help="Measure a device that is in use.")
@click.argument("arguments", nargs=-1)
def profile(**options: Any) -> None:
    """Measure a job's layers on one device of this machine; `sailorctl profile model` calls this.

    JOB is a job file or a script; ARGUMENTS, after --, are those of a script.
    """
    # The profiler of torch, which counts bytes on CPUs, talks to stderr otherwise.
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    from worker.cli.profile_run import ProfileOptions  # noqa: PLC0415 - loads torch, which takes seconds
    from worker.cli.profile_run import profile as measure  # noqa: PLC0415 - the same

    measure(ProfileOptions(**options))


@main.command("convert-tokens")
@click.argument("texts", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option("--out", required=True, type=click.Path(path_type=Path), help="Token file to write.")
@click.option(
    "--tokenizer",
    type=click.Path(path_type=Path),
    help="tokenizer.json, or a model's folder that has one; default: bytes are tokens.",
)
@click.option("--end-of-text", help="Token behind each document; default: the tokenizer's.")
def convert_tokens(
    texts: tuple[Path, ...], out: Path, tokenizer: Path | None, end_of_text: str | None
) -> None:
    """Convert texts to a token file, by a model's own tokenizer.

    Each text is a document; of a file *.jsonl each line is one, by its "text".
    """
    from worker.data.sources.tokenize_text import convert_text  # noqa: PLC0415 - loads numpy

    count = convert_text(texts, out, tokenizer, end_of_text=end_of_text)
    click.echo(f"{out}: {count:,} tokens")


_FORMS = {
    "huggingface": "Hugging Face's safetensors (weights only)",
    "deepspeed": "DeepSpeed's universal checkpoint",
    "dcp": "torch's DCP",
    "megatron": "Megatron-Core's torch_dist",
}


@main.command("export-checkpoint")
@click.argument("manifest")
@click.option("--to", "out", required=True, type=click.Path(path_type=Path), help="A new folder.")
@click.option(
    "--form",
    type=click.Choice(list(_FORMS)),
    default="huggingface",
    show_default=True,
    help=f"{', '.join(_FORMS.values())}.",
)
@click.option("--job", type=click.Path(path_type=Path), help="Script or job file of the model.")
def export_checkpoint(manifest: str, out: Path, form: str, job: Path | None) -> None:
    """Export the checkpoint of a manifest to another format.

    With the script or job file of a model, its frozen parameters come along, and of a model of
    transformers its config and tokenizer; Megatron's form needs it for such a model.
    """
    if job is not None and form not in ("huggingface", "megatron"):
        raise InputError(Problem("--job", f"is not for --form {form}", "leave it out"))
    from worker.checkpoint.by_tensor.saved_state import open_saved_state  # noqa: PLC0415 - the same
    from worker.checkpoint.other_formats import convert  # noqa: PLC0415 - loads torch, which takes seconds
    from worker.checkpoint.other_formats.megatron import export_megatron  # noqa: PLC0415 - the same
    from worker.script.open_job import open_saved_module  # noqa: PLC0415 - the same

    convert.return_freed_memory()
    state = open_saved_state(manifest)
    module = None
    if job is not None:
        with printing_to_stderr():
            arguments = () if state.job.work is None else state.job.work.arguments
            module = open_saved_module(job, state.job, arguments)
    if form == "megatron":
        export_megatron(state, None if module is None else module.config, out)
    elif module is not None:
        with (
            printing_to_stderr(),
            convert.created_folder(out) as folder,
            convert.mapped_weights(state, folder.parent) as weights,
        ):
            module.save(weights, folder)
    else:
        exports = {
            "huggingface": convert.export_huggingface,
            "deepspeed": convert.export_deepspeed,
            "dcp": convert.export_dcp,
        }
        exports[form](state, out)
    click.echo(f"{out}: step {state.progress.step}, {len(state.pieces.specs):,} tensors")


@main.command("import-checkpoint")
@click.argument("folder", type=click.Path(path_type=Path))
@click.option(
    "--job", "job_file", required=True, type=click.Path(path_type=Path), help="Job file or script."
)
@click.option("--name", required=True, help="The job's name in the cluster.")
@click.option("--to", "out", required=True, type=click.Path(path_type=Path), help="A new file.")
@click.option(
    "--form",
    type=click.Choice(list(_FORMS)),
    default="deepspeed",
    show_default=True,
    help=f"{', '.join(_FORMS.values())}.",
)
@click.option("--step", type=click.IntRange(0), help="Of a DCP that does not say its own.")
@click.argument("arguments", nargs=-1)
def import_checkpoint(
    folder: Path,
    job_file: Path,
    name: str,
    out: Path,
    form: str,
    step: int | None,
    arguments: tuple[str, ...],
) -> None:
    """Convert a checkpoint of another form to one snapshot file.

    ARGUMENTS, after --, are those of a job that is a script. ``sailorctl checkpoint import`` makes
    a checkpoint of the file.
    """
    from simulator.documents.files import load_document  # noqa: PLC0415 - as below
    from simulator.inputs.job_file import load_job  # noqa: PLC0415 - as below
    from worker.checkpoint.other_formats import convert  # noqa: PLC0415 - loads torch, which takes seconds
    from worker.checkpoint.other_formats.megatron import import_megatron  # noqa: PLC0415 - the same
    from worker.data.sample_order import order_of  # noqa: PLC0415 - the same
    from worker.script.hf_job import names_hf  # noqa: PLC0415 - the same
    from worker.script.open_job import names_module, open_job  # noqa: PLC0415 - the same

    if step is not None and form != "dcp":
        raise InputError(Problem("--step", f"is not for --form {form}", "leave it out"))
    convert.return_freed_memory()
    config, order = None, ""
    is_described = job_file.suffix != ".py" and not names_hf(
        load_document(job_file, flaws_raise=False)
    )
    if is_described and not (form == "megatron" and names_module(job_file)):
        job = load_job(job_file)
    else:
        with printing_to_stderr():
            job, module = open_job(job_file, arguments)
            config, order = module.config, order_of(module.data())
    if form == "megatron":
        header = import_megatron(folder, job, config, name, out)
    elif form == "dcp":
        header = convert.import_dcp(folder, job, name, out, step=step, order=order)
    elif form == "deepspeed":
        header = convert.import_deepspeed(folder, job, name, out)
    else:
        header = convert.import_huggingface(folder, job, name, out)
    click.echo(f"{out}: step {header.step}, {header.total_bytes:,} bytes")
