"""Opens models of transformers from local folders, and copies what belongs to their weights.

Parameters are views of the mapped files, so a rank keeps in memory only those that it trains.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from torch import nn

from simulator.documents.problems import InputError, Problem

_COMPANIONS = (
    *("tokenizer*", "vocab.*", "merges.txt", "special_tokens_map.json", "added_tokens.json"),
    *("chat_template*", "*.tiktoken", "*.model", "preprocessor_config.json"),
    "processor_config.json",
)
"""Files of tokenizers and image processors, which ``from_pretrained`` expects beside weights."""


def hf(folder: str | Path, **config: Any) -> nn.Module:
    """Open a causal language model or an image classifier of transformers, with its weights.

    ``folder`` holds a config.json and safetensors files, or is a name in the local cache; nothing
    is downloaded. ``config`` changes its keys; a classifier of another ``num_labels`` is new.
    """
    place = str(folder)
    if importlib.util.find_spec("transformers") is None:
        cure = "install it: pip install transformers"
        raise InputError(Problem(place, "needs transformers, which is not installed", cure))
    source = source_folder(place)
    if source is None:
        what = "is neither a folder with a config.json nor a name in the local cache"
        raise InputError(Problem(place, what, "download it before: hf download NAME"))
    options = {"dtype": "auto", "local_files_only": True, "use_safetensors": True}
    is_changed = "num_labels" in config
    try:
        with _synchronous():
            model, found = _auto_class(place, source).from_pretrained(
                str(source),
                output_loading_info=True,
                ignore_mismatched_sizes=is_changed,
                **{**options, **config},
            )
    except (OSError, ValueError, RuntimeError) as error:
        first = str(error).strip().partition("\n")[0]
        raise InputError(Problem(place, f"cannot be opened: {first}")) from None
    assert isinstance(model, nn.Module)
    _check_names(place, model, found, may_be_new=is_changed)
    return model


def _check_names(place: str, model: nn.Module, found: dict[str, Any], *, may_be_new: bool) -> None:
    """Raise ``InputError`` if weights would start from random numbers, a new classifier apart."""
    mismatched = {name for name, *_ in found["mismatched_keys"]}
    lacking = {*found["missing_keys"], *mismatched}
    if lacking and may_be_new:
        lacking -= _names_of_classifier(model)
    if not lacking:
        return
    names = sorted(lacking)
    listed = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
    cure = "use the weights of the whole model"
    if lacking & mismatched:
        cure += ", and their shapes in the config"
    what = f"lacks {listed}, which would start from random numbers"
    raise InputError(Problem(place, what, cure))


def _names_of_classifier(model: nn.Module) -> set[str]:
    """Return the parameters and buffers whose shape depends on the number of labels."""
    config: Any = deepcopy(model.config)
    config.num_labels += 1
    with torch.device("meta"):
        other = type(model)(config)
    shapes = {name: each.shape for name, each in other.state_dict().items()}
    return {name for name, each in model.state_dict().items() if shapes.get(name) != each.shape}


def _auto_class(place: str, source: Path) -> Any:
    """Return the class by which transformers opens the architecture that the config names."""
    from transformers import (  # noqa: PLC0415 - an optional package
        AutoConfig,
        AutoModelForCausalLM,
        AutoModelForImageClassification,
    )

    config = AutoConfig.from_pretrained(source, local_files_only=True)
    if getattr(config, "quantization_config", None) is not None:
        raise InputError(Problem(place, "is quantised", "use the weights in full precision"))
    architecture = next(iter(config.architectures or ()), "none")
    for kind in (AutoModelForCausalLM, AutoModelForImageClassification):
        known = kind._model_mapping.get(type(config), None)
        if architecture in [each.__name__ for each in _as_tuple(known) if each is not None]:
            return kind
    what = f"has the architecture {architecture}, not a causal language model or image classifier"
    cure = "open it in a script by its own class of transformers"
    raise InputError(Problem(place, what, cure))


def _as_tuple(value: Any) -> tuple[Any, ...]:
    return value if isinstance(value, tuple) else (value,)


@contextmanager
def _synchronous() -> Iterator[None]:
    """Let transformers load without threads, which a fork would lose, and without a progress bar.

    Mapped files need no threads.
    """
    from transformers.utils import logging  # noqa: PLC0415 - an optional package

    name = "HF_DEACTIVATE_ASYNC_LOAD"
    before, showed = os.environ.get(name), logging.is_progress_bar_enabled()
    os.environ[name] = "1"
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if showed:
            logging.enable_progress_bar()
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


def source_folder(name: str) -> Path | None:
    """Return the local folder of a model: itself, or the one that the cache has for a name."""
    if Path(name, "config.json").is_file():
        return Path(name)
    if importlib.util.find_spec("huggingface_hub") is None:
        return None
    from huggingface_hub import try_to_load_from_cache  # noqa: PLC0415 - an optional package
    from huggingface_hub.errors import HFValidationError  # noqa: PLC0415 - the same

    try:
        found = try_to_load_from_cache(name, "config.json")
    except HFValidationError:
        return None
    return Path(found).parent if isinstance(found, str) else None


def check_not_overwritten(source: Path | None, folder: Path) -> None:
    """Refuse to save to the folder of the weights that are in use."""
    if source is not None and folder.resolve() == source.resolve():
        what = "is the folder of the model that is trained"
        raise InputError(Problem(str(folder), what, "save to another one"))


def copy_companions(source: Path, folder: Path) -> None:
    """Copy the files of the tokenizer or image processor that are not in the folder already."""
    for pattern in _COMPANIONS:
        for each in sorted(source.glob(pattern)):
            if each.is_file() and not (folder / each.name).exists():
                shutil.copyfile(each, folder / each.name)
