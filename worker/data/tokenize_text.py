"""Converts a text to a token file: its bytes, or the entries of a given vocabulary."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import numpy as np
from numpy.lib import format as npy

from simulator.documents.files import load_document
from simulator.documents.problems import InputError, Problem

_CHUNK = 2**22
_TOKEN_MAX = 2**32 - 1


def convert_text(text: Path, out: Path, vocabulary: Path | None) -> int:
    """Write the tokens of a UTF-8 text and return how many there are.

    Without a vocabulary each byte is a token. With one, a JSON object from texts to numbers, the
    text is split greedily into the longest entries.
    """
    pieces = None if vocabulary is None else _read_vocabulary(vocabulary)
    largest = 255 if pieces is None else max(pieces.values())
    width = np.dtype(np.uint16 if largest < 2**16 else np.uint32)
    unfinished = out.with_name(f"{out.name}.unfinished")
    try:
        with text.open("rb") as source:
            chunks = iter(lambda: source.read(_CHUNK), b"")
            found = chunks if pieces is None else _pieces(source, pieces, text.name)
            return _write(found, out, unfinished, width)
    except OSError as error:
        named = text if error.filename == str(text) else out
        what = f"cannot be {'read' if named is text else 'written'}: {error.strerror or error}"
        raise InputError(Problem(str(named), what)) from None
    finally:
        unfinished.unlink(missing_ok=True)


def _write(
    found: Iterator[list[int] | bytes], out: Path, unfinished: Path, width: np.dtype[np.generic]
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


def _pieces(source: BinaryIO, pieces: dict[str, int], name: str) -> Iterator[list[int]]:
    longest = max(map(len, pieces))
    for number, line in enumerate(source, start=1):
        try:
            text = line.decode()
        except UnicodeDecodeError:
            raise InputError(
                Problem(f"{name}: line {number}", "is not UTF-8", "convert the text to UTF-8")
            ) from None
        tokens, place = [], 0
        while place < len(text):
            for size in range(min(longest, len(text) - place), 0, -1):
                token = pieces.get(text[place : place + size])
                if token is not None:
                    tokens.append(token)
                    place += size
                    break
            else:
                what = f"{text[place]!r} is not in the vocabulary"
                raise InputError(
                    Problem(f"{name}: line {number}", what, "add it, or leave it out of the text")
                )
        yield tokens


def _read_vocabulary(path: Path) -> dict[str, int]:
    document = load_document(path)
    wrong = [
        text
        for text, token in document.data.items()
        if not text or type(token) is not int or not 0 <= token <= _TOKEN_MAX
    ]
    if wrong or not document.data:
        what = f"{wrong[0]!r} has no number from 0 on" if wrong else "is empty"
        cure = 'give a JSON object from texts to their numbers, as in {"a": 0, "b": 1}'
        raise InputError(Problem(document.name, what, cure))
    return dict(document.data)
