"""Images with class labels: two arrays, or a folder with one subfolder per class."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from simulator.documents.problems import InputError, Problem
from worker.data.batch import Samples, samples_of
from worker.data.data_files import DataFile, data_file
from worker.data.shuffle import sample_numbers
from worker.data.sources.npy import open_array

Pixels = NDArray[np.float32]
"""One image: (channels, height, width)."""

_SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".webp", ".ppm", ".pgm")
_SAVE = "save it with numpy.save"


class LabelledImages(Protocol):
    """Numbered images and their classes."""

    @property
    def labels(self) -> NDArray[np.int64]:
        """The class of each image."""

    @property
    def files(self) -> tuple[DataFile, ...]:
        """The files that must stay as they are."""

    def pixels(self, number: int) -> Pixels:
        """Return one image; byte values are scaled to -1 to 1."""


@dataclass(frozen=True, slots=True)
class ImageData:
    """Images shuffled by epoch."""

    labelled: LabelledImages
    global_batch: int
    seed: int

    @property
    def files(self) -> tuple[DataFile, ...]:
        return self.labelled.files

    def batch(self, step: int, positions: Sequence[int]) -> Samples:
        for file in self.files:
            file.check()
        labels = self.labelled.labels
        numbers = sample_numbers(
            step, positions, global_batch=self.global_batch, count=len(labels), seed=self.seed
        )
        images = np.stack([self.labelled.pixels(int(number)) for number in numbers])
        return samples_of(images, labels[numbers], step=step, positions=positions)


@dataclass(frozen=True, slots=True)
class ImageArrays:
    """Images in one array and their classes in another."""

    images: NDArray[Any]
    labels: NDArray[np.int64]
    channels_last: bool
    files: tuple[DataFile, ...] = ()

    def pixels(self, number: int) -> Pixels:
        image = self.images[number]
        return _scale(image.transpose(2, 0, 1) if self.channels_last else image)


@dataclass(frozen=True, slots=True)
class ImageFolder:
    """Image files; classes are the subfolders in alphabetical order."""

    paths: tuple[Path, ...]
    labels: NDArray[np.int64]
    image: int
    channels: int
    files: tuple[DataFile, ...] = ()
    """Empty: an image that changes is read as it is now."""

    def pixels(self, number: int) -> Pixels:
        from PIL import Image  # noqa: PLC0415 - only folders need it

        path = self.paths[number]
        try:
            with Image.open(path) as file:
                picture = file.convert("RGB" if self.channels == 3 else "L")
        except Exception as error:  # Pillow raises several of its own for what is in a file.
            what = f"{path} cannot be read as an image: {str(error) or type(error).__name__}"
            raise InputError(Problem("images", what, "remove or replace it")) from None
        pixels = np.asarray(picture.resize((self.image, self.image), Image.Resampling.BILINEAR))
        return _scale(pixels.reshape(self.image, self.image, -1).transpose(2, 0, 1))


def _scale(pixels: NDArray[Any]) -> Pixels:
    if pixels.dtype == np.uint8:
        return pixels.astype(np.float32) / np.float32(127.5) - np.float32(1)
    return pixels.astype(np.float32)


def open_image_arrays(
    images_path: Path, labels_path: Path, *, image: int, channels: int, classes: int
) -> ImageArrays:
    """Map images and labels into memory; ``InputError`` says what does not fit."""
    images, labels = (open_array(path, cure=_SAVE) for path in (images_path, labels_path))
    first, last = (channels, image, image), (image, image, channels)
    if images.ndim != 4 or images.shape[1:] not in (first, last):
        what = f"has shape {images.shape}, but the model's images are {first} or {last} each"
        raise InputError(Problem(images_path.name, what, "resize them, or change the model"))
    if images.dtype not in (np.uint8, np.float32):
        what = f"holds {images.dtype}; images are bytes or 32-bit floats"
        raise InputError(Problem(images_path.name, what, "convert it"))
    if labels.shape != images.shape[:1] or labels.dtype.kind not in "ui" or len(labels) == 0:
        what = f"holds {labels.dtype} of shape {labels.shape}, not a class for each of the images"
        raise InputError(Problem(labels_path.name, what, "give one integer for each image"))
    numbers = np.asarray(labels, dtype=np.int64)
    wrong = (numbers < 0) | (numbers >= classes)
    if wrong.any():
        place = int(np.argmax(wrong))
        what = f"image {place} is of class {numbers[place]}, but the model has {classes} classes"
        raise InputError(Problem(labels_path.name, what, "count classes from 0"))
    files = (data_file(images_path), data_file(labels_path))
    return ImageArrays(images, numbers, channels_last=images.shape[1:] != first, files=files)


def open_image_folder(path: Path, *, image: int, channels: int, classes: int) -> ImageFolder:
    """List the images of a folder; ``InputError`` says why they cannot be used."""
    if importlib.util.find_spec("PIL") is None:
        what = "a folder of images needs the package Pillow"
        raise InputError(Problem("images", what, "install pillow, or give arrays"))
    if channels not in (1, 3):
        what = f"files of images have 1 or 3 channels, the model's images {channels}"
        raise InputError(Problem("images", what, "give arrays"))
    folders = sorted(each for each in path.iterdir() if each.is_dir())
    found = [
        (file, number)
        for number, folder in enumerate(folders)
        for file in sorted(folder.iterdir())
        if file.suffix.lower() in _SUFFIXES
    ]
    if not found:
        what = f"{path} has no folders with images in them"
        raise InputError(
            Problem("images", what, "give a folder that has one folder for each class")
        )
    if len(folders) > classes:
        what = f"{path} has {len(folders)} folders, but the model has {classes} classes"
        raise InputError(Problem("images", what, "give the model as many classes as folders"))
    return ImageFolder(
        tuple(file for file, _ in found),
        np.array([number for _, number in found], dtype=np.int64),
        image,
        channels,
    )
