"""Image classification from files, decoded and augmented in the loader's processes."""

import hashlib
import os
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torchvision.transforms import v2

from ..errors import Refused
from .base import BatchDataset, DataModule, LoaderOptions
from .digits import write_digits
from .folders import build_once, sampled_blocks, spread
from .index import Labelled, class_names, index_folder, index_table
from .order import IGNORE, PAD, Keys, seed_of
from .skipped import Skipped

AUGMENTATIONS = ("none", "light", "standard")
TRIES = 100  # neighbours that may stand in for an image that cannot be read
# What Pillow raises for broken files.
BROKEN = (OSError, SyntaxError, ValueError, Image.DecompressionBombError)


class ImageDataset(BatchDataset):
    """Decoded, transformed, normalised images.

    `dataset[keys]` gives (images, labels): float32 of shape (batch, channels, size, size) and int64
    of shape (batch,), IGNORE where a key is padding; with `mix` float32 of shape (batch, classes), each
    row the shares of the classes that were mixed. An image that may be skipped is replaced: in
    training by the next one that can be read, so that a batch stays as full as it was, and otherwise
    by padding, which no metric counts.
    """

    def __init__(
        self,
        items: list[Labelled],
        classes: list[str],
        transform: v2.Transform,
        channels: int,
        seed: int,
        skipped: Skipped,
        train: bool,
        mix: v2.Transform | None = None,
    ) -> None:
        number = {name: label for label, name in enumerate(classes)}
        # Arrays, not lists: a forked worker that touches a list's reference counts copies its memory.
        self.paths = np.array([os.fsencode(item.path) for item in items], dtype=np.bytes_)
        self.labels = np.array([number[item.label] for item in items], dtype=np.int64)
        self.classes, self.skipped, self.train = classes, skipped, train
        self.mix = mix
        self.transform, self.mode, self.seed = transform, "L" if channels == 1 else "RGB", seed

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, keys: Keys) -> tuple[Tensor, Tensor]:
        found = [None if index == PAD else self._sample(epoch, index) for epoch, index in keys]
        # Padding must have the shape of the others; of a whole batch of it, that of any image.
        like = next((sample[0] for sample in found if sample), None)
        blank = torch.zeros_like(self._any_image() if like is None else like)
        images = torch.stack([sample[0] if sample else blank for sample in found])
        labels = torch.tensor([sample[1] if sample else IGNORE for sample in found])
        if self.mix is not None:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(seed_of(self.seed, "mix", *keys[0]))
                images, labels = self.mix(images, labels)
        return images, labels

    def counts(self) -> dict[str, int]:
        """Images, and how many of each class."""
        of_class = np.bincount(self.labels, minlength=len(self.classes)).tolist()
        named = {f"class {name}": n for name, n in zip(self.classes, of_class, strict=True) if n}
        return {"samples": len(self), **dict(sorted(named.items()))}

    def digest(self) -> str:
        """Of every file's class and name, 4,096 files' sizes, and blocks of 64 files."""
        paths: list[bytes] = self.paths.tolist()
        digest = hashlib.blake2b(digest_size=8)
        names = [os.fsencode(name) for name in self.classes]
        for path, label in zip(paths, self.labels.tolist(), strict=True):
            digest.update(names[label] + b"/" + os.path.basename(path) + b"\n")
        for path in spread(paths, 4096):
            digest.update(f"{_size(path)}\n".encode())
        for path in spread(paths, 64):
            if _size(path) >= 0:
                digest.update(sampled_blocks(Path(os.fsdecode(path)), 4))
        return digest.hexdigest()

    def _sample(self, epoch: int, index: int) -> tuple[Tensor, int] | None:
        """An image and its label; None: it may be left out. In training another takes its place.

        Raises:
            Refused: when it may not, or when nothing near it can be read either.
        """
        for _ in range(TRIES):
            path = os.fsdecode(self.paths[index])
            try:
                pixels = self._pixels(path)
            except BROKEN as error:
                self.skipped.note(path, error)
            else:
                return self._augmented(pixels, epoch, index), int(self.labels[index])
            if not self.train:
                return None
            index = (index + 1) % len(self)
        raise Refused(f"data.on_error=skip: {TRIES} images in a row cannot be read, up to {path}")

    def _any_image(self) -> Tensor:
        pixels = v2.functional.pil_to_tensor(Image.new(self.mode, (64, 64)))
        return self._augmented(pixels, 0, PAD)

    def _pixels(self, path: str) -> Tensor:
        with Image.open(path) as file:
            pixels: Tensor = v2.functional.pil_to_tensor(file.convert(self.mode))
        return pixels

    def _augmented(self, pixels: Tensor, epoch: int, index: int) -> Tensor:
        # torchvision draws from torch's global generator: lend it a seed of this sample's own.
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed_of(self.seed, "augment", epoch, index))
            result: Tensor = self.transform(pixels)
        return result


class ImageData(DataModule):
    """Args: see configs/data/image_folder.yaml; `source="digits"` writes the embedded data first."""

    def __init__(
        self,
        folder: str,
        num_classes: int,
        image_size: int,
        channels: int,
        mean: list[float],
        std: list[float],
        augment: str,
        val_fraction: float,
        test_fraction: float,
        options: LoaderOptions,
        source: str | None = None,
        table: str | None = None,
        columns: dict[str, str | None] | None = None,
        on_error: str = "raise",
        mixup: float = 0.0,
        cutmix: float = 0.0,
    ) -> None:
        super().__init__(options, on_error)
        if augment not in AUGMENTATIONS:
            raise Refused(f"data.augment={augment}: choose one of {', '.join(AUGMENTATIONS)}")
        if source not in (None, "digits"):
            raise Refused(f"data.source={source}: it takes digits, or null for your own folder")
        if not len(mean) == len(std) == channels or channels not in (1, 3):
            raise Refused(
                f"data.channels={channels} takes as many values in data.mean and data.std"
            )
        self.folder, self.source = Path(folder).expanduser(), source
        self.table = Path(table).expanduser() if table else None
        self.columns = columns or {}
        self.num_classes, self.channels = num_classes, channels
        self.fractions = {"val": val_fraction, "test": test_fraction}
        normalise = [v2.ToDtype(torch.float32, scale=True), v2.Normalize(mean, std)]
        plain = [v2.Resize(image_size, antialias=True), v2.CenterCrop(image_size)]
        self.mix = _mixing(mixup, cutmix, num_classes)
        self.train_transform = v2.Compose([*_augmentation(augment, image_size), *normalise])
        self.eval_transform = v2.Compose([*plain, *normalise])

    def prepare_data(self) -> None:
        if self.source == "digits":
            build_once(self.folder, write_digits)

    def setup(self, stage: str | None = None) -> None:
        if self.splits:
            return
        if self.table is None:
            found = index_folder(self.folder, self.fractions)
        else:
            found = index_table(self.table, self.folder, self.columns, self.fractions)
        classes = class_names(found, by_number=self.table is not None)
        if len(classes) != self.num_classes:
            raise Refused(
                f"data.num_classes={self.num_classes}, but {self.table or self.folder / 'train'} holds "
                f"{len(classes)} classes: set data.num_classes={len(classes)}"
            )
        for split, items in found.items():
            if self.skipped.on_error == "raise":
                _check_there([item.path for item in items])
            train = split == "train"
            self.splits[split] = ImageDataset(
                items,
                classes,
                self.train_transform if train else self.eval_transform,
                self.channels,
                self.options.seed,
                self.skipped,
                train,
                self.mix if train else None,
            )


def _size(path: bytes) -> int:
    """Of a file in bytes; -1 when it is not there."""
    try:
        return os.stat(path).st_size
    except FileNotFoundError:
        return -1


def _check_there(paths: list[Path]) -> None:
    """Refuse a wrong folder or list at the start; a thousand files tell, and are looked up quickly."""
    if missing := next((path for path in spread(paths, 1000) if not path.is_file()), None):
        raise Refused(f"{missing} is not there: data.folder is what paths are relative to")


def _mixing(mixup: float, cutmix: float, num_classes: int) -> v2.Transform | None:
    """Of whole batches: mixup (https://arxiv.org/abs/1710.09412), CutMix
    (https://arxiv.org/abs/1905.04899), or for each batch one of the two."""
    if mixup < 0 or cutmix < 0:
        raise Refused("data.mixup and data.cutmix take a number from 0 (off) on")
    parts: list[v2.Transform] = []
    if mixup:
        parts.append(v2.MixUp(alpha=mixup, num_classes=num_classes))
    if cutmix:
        parts.append(v2.CutMix(alpha=cutmix, num_classes=num_classes))
    return v2.RandomChoice(parts) if parts else None


def _augmentation(name: str, size: int) -> list[v2.Transform]:
    """Transforms of training images on uint8, ending at (channels, size, size)."""
    if name == "standard":
        return [
            v2.RandomResizedCrop(size, scale=(0.35, 1.0), antialias=True),
            v2.RandomHorizontalFlip(),
        ]
    plain: list[v2.Transform] = [v2.Resize(size, antialias=True), v2.CenterCrop(size)]
    if name == "light":
        plain.append(v2.RandomAffine(degrees=10, translate=(0.1, 0.1), scale=(0.9, 1.1)))
    return plain
