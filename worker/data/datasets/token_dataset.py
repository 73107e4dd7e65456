"""A token file as a data set: consecutive pieces of one length."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from worker.data.data_files import data_file
from worker.data.sources.token_file import open_token_array


class Tokens:
    """Pieces of a memory-mapped token file, for models that predict one token ahead.

    ``python -m worker convert-tokens`` makes such files. Labels are the tokens themselves, as
    models of transformers take them; tokens behind the last whole piece are not used.
    """

    def __init__(self, path: str | Path, sequence: int) -> None:
        self.sequence = sequence
        self._tokens = open_token_array(Path(path), at_least=sequence)
        self.files = (data_file(Path(path)),)

    def __len__(self) -> int:
        return len(self._tokens) // self.sequence

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        if not 0 <= index < len(self):
            raise IndexError(index)
        self.files[0].check()
        piece = self._tokens[index * self.sequence : (index + 1) * self.sequence]
        tokens = torch.from_numpy(piece.astype(np.int64))
        return {"input_ids": tokens, "labels": tokens.clone()}
