"""Converts texts to a token file: their bytes, or tokens of a model's own tokenizer."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Protocol

import numpy as np
from numpy.lib import format as npy

from simulator.documents.problems import InputError, Problem

_CHUNK = 2**22
_BATCH = 2**10
"""How many documents are converted at once, on all cores."""
_ENDS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|im_end|>")
"""What tokenizers without a configuration call the end of a text."""

TextTokens = list[int] | bytes


class Encoder(Protocol):
    """What is used of a tokenizer of the package ``tokenizers``."""

    def encode(self, text: str, *, add_special_tokens: bool) -> Any:
        """Convert a text; the result has ``ids``."""

    def encode_batch(self, texts: list[str], *, add_special_tokens: bool) -> list[Any]:
        """Convert several texts."""


@dataclass(frozen=True, slots=True)
class Tokenizer:
    """A model's tokenizer, and what it puts behind each document."""

    encoder: Encoder
    end: int
    size: int


def convert_text(
    texts: Path | Iterable[Path],
    out: Path,
    tokenizer: Path | None = None,
    *,
    end_of_text: str | None = None,
) -> int:
    """Write the tokens of UTF-8 texts and return how many there are.

    Without a tokenizer each byte is a token. With one, a text is one document; of a file named
    ``*.jsonl`` each line is one, by its ``text``. Behind each document stands the end of a text.
    """
    paths = [texts] if isinstance(texts, Path) else list(texts)
    opened = None if tokenizer is None else open_tokenizer(tokenizer, end_of_text)
    width = np.dtype(np.uint16 if opened is None or opened.size <= 2**16 else np.uint32)
    unfinished = out.with_name(f"{out.name}.unfinished")
    try:
        return _write(_all_tokens(paths, opened), out, unfinished, width)
    except OSError as error:
        named = next((path for path in paths if error.filename == str(path)), out)
        what = f"cannot be {'written' if named is out else 'read'}: {error.strerror or error}"
        raise InputError(Problem(str(named), what)) from None
    finally:
        unfinished.unlink(missing_ok=True)


def open_tokenizer(path: Path, end_of_text: str | None = None) -> Tokenizer:
    """Open a ``tokenizer.json``, or a folder that has one."""
    try:
        from tokenizers import Tokenizer as Library  # noqa: PLC0415 - an optional package
    except ModuleNotFoundError:
        what = "needs the package tokenizers, which is not installed"
        raise InputError(Problem("--tokenizer", what, "install the group `hf`")) from None
    file = path / "tokenizer.json" if path.is_dir() else path
    if not file.is_file():
        what = "has no tokenizer.json" if path.is_dir() else "does not exist"
        cure = "name a tokenizer.json of the package tokenizers, or a model's folder that has one"
        raise InputError(Problem(str(path), what, cure))
    try:
        library = Library.from_file(str(file))
    except Exception as error:  # The library raises nothing more precise.
        what = f"is not a tokenizer of the package tokenizers: {error}"
        raise InputError(Problem(str(file), what)) from None
    library.no_truncation()
    library.no_padding()
    end = end_of_text or _configured_end(file.parent)
    numbers = map(library.token_to_id, _ENDS if end is None else (end,))
    number = next((each for each in numbers if each is not None), None)
    if number is None:
        what = f"has no token {end!r}" if end else "does not say which token ends a text"
        raise InputError(Problem("--end-of-text", what, "name the token that ends a document"))
    return Tokenizer(library, number, library.get_vocab_size(with_added_tokens=True))


def _configured_end(folder: Path) -> str | None:
    """Return the end of a text that a model's folder names."""
    try:
        found = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    end = found.get("eos_token") if isinstance(found, dict) else None
    end = end.get("content") if isinstance(end, dict) else end
    return end if isinstance(end, str) else None


def _all_tokens(paths: list[Path], tokenizer: Tokenizer | None) -> Iterator[TextTokens]:
    for path in paths:
        with path.open("rb") as source:
            if tokenizer is None:
                while chunk := source.read(_CHUNK):
                    yield chunk
            elif path.suffix == ".jsonl":
                yield from _convert_lines(source, tokenizer, path.name)
            else:
                yield from pieces_of(_decode_lines(source, path.name), tokenizer.encoder)
                yield [tokenizer.end]


def _convert_lines(source: BinaryIO, tokenizer: Tokenizer, name: str) -> Iterator[list[int]]:
    """Convert the documents of a file of JSON lines, many at a time."""
    waiting: list[str] = []

    def converted() -> Iterator[list[int]]:
        for found in tokenizer.encoder.encode_batch(waiting, add_special_tokens=False):
            yield [*found.ids, tokenizer.end]
        waiting.clear()

    for number, line in enumerate(source, start=1):
        try:
            document = json.loads(line)
            text = document["text"]
        except (ValueError, TypeError, KeyError):
            text = None
        if not isinstance(text, str):
            what = 'is not a JSON object with a "text"'
            raise InputError(Problem(f"{name}: line {number}", what, "give one on each line"))
        waiting.append(text)
        if len(waiting) == _BATCH:
            yield from converted()
    yield from converted()


def _decode_lines(source: BinaryIO, name: str) -> Iterator[str]:
    """Read a text line by line."""
    for number, line in enumerate(source, start=1):
        try:
            yield line.decode()
        except UnicodeDecodeError:
            what = "is not UTF-8"
            raise InputError(
                Problem(f"{name}: line {number}", what, "convert the text to UTF-8")
            ) from None


def pieces_of(
    lines: Iterable[str], encoder: Encoder, *, chunk: int = _CHUNK
) -> Iterator[list[int]]:
    """Convert a document of any length to the tokens of the whole.

    It is cut between two lines, after ``chunk`` characters, where the lines around the cut give the
    same tokens together as each alone. A tokenizer without such places gets the whole text.
    """

    def ids(text: str) -> list[int]:
        found: list[int] = encoder.encode(text, add_special_tokens=False).ids
        return found

    kept: list[str] = []
    size = 0
    for line in lines:
        if size >= chunk and _is_apart(kept[-1], line, ids):
            yield ids("".join(kept))
            kept, size = [], 0
        kept.append(line)
        size += len(line)
    if kept:
        yield ids("".join(kept))


def _is_apart(before: str, after: str, ids: Callable[[str], list[int]]) -> bool:
    # Spaces on both sides of a line's end may become one token.
    if not before.strip() or before[-2:-1].isspace() or after[:1].isspace():
        return False
    return ids(before + after) == ids(before) + ids(after)


def _write(
    found: Iterator[TextTokens], out: Path, unfinished: Path, width: np.dtype[np.generic]
) -> int:
    """Write chunk by chunk; the token count in the header is filled in at the end."""
    count = 0
    with unfinished.open("wb") as file:
        _header(file, 0, width)
        for chunk in found:
            array = np.frombuffer(chunk, np.uint8) if isinstance(chunk, bytes) else chunk
            np.asarray(array, dtype=width).tofile(file)
            count += len(chunk)
        file.seek(0)
        _header(file, count, width)
    unfinished.replace(out)
    return count


def _header(file: BinaryIO, count: int, width: np.dtype[np.generic]) -> None:
    # numpy pads the header, so a larger count does not change its size.
    descr = npy.dtype_to_descr(width)
    npy.write_array_header_1_0(file, {"descr": descr, "fortran_order": False, "shape": (count,)})
