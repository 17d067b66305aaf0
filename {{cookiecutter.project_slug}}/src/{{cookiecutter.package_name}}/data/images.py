"""Image classification from a folder per class: `train/<class>/*.jpg`, and `val/`, `test/` alike."""

import hashlib
import os
from collections import Counter
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torchvision.transforms import v2

from ..errors import Refused
from .base import BatchDataset, DataModule, LoaderOptions
from .digits import write_digits
from .folders import build_once, place_of, sampled_blocks, spread
from .order import IGNORE, PAD, Keys, seed_of

SUFFIXES = {".jpg", ".jpeg", ".png", ".webp", ".bmp"}
SPLITS = ("train", "val", "test")
AUGMENTATIONS = ("none", "light", "standard")


class ImageDataset(BatchDataset):
    """Decoded, transformed, normalised images.

    `dataset[keys]` gives (images, labels): float32 of shape (batch, channels, size, size) and int64
    of shape (batch,), IGNORE where a key is padding.
    """

    def __init__(
        self,
        paths: list[Path],
        labels: list[int],
        transform: v2.Transform,
        channels: int,
        seed: int,
    ) -> None:
        # Arrays, not lists: a forked worker that touches a list's reference counts copies its memory.
        self.paths = np.array([os.fsencode(path) for path in paths], dtype=np.bytes_)
        self.labels = np.array(labels, dtype=np.int64)
        self.transform, self.mode, self.seed = transform, "L" if channels == 1 else "RGB", seed

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, keys: Keys) -> tuple[Tensor, Tensor]:
        images = [self._image(epoch, max(index, 0)) for epoch, index in keys]
        labels = [IGNORE if index == PAD else int(self.labels[index]) for _, index in keys]
        return torch.stack(images), torch.tensor(labels)

    def counts(self) -> dict[str, int]:
        """Images, and how many of each class."""
        classes = Counter(os.path.basename(os.path.dirname(path)) for path in self.paths.tolist())
        named = {f"class {os.fsdecode(name)}": n for name, n in sorted(classes.items())}
        return {"samples": len(self), **named}

    def digest(self) -> str:
        """Of every file's class and name, 4,096 files' sizes, and blocks of 64 files."""
        paths: list[bytes] = self.paths.tolist()
        digest = hashlib.blake2b(digest_size=8)
        for path in paths:
            folder, name = os.path.split(path)
            digest.update(os.path.basename(folder) + b"/" + name + b"\n")
        for path in spread(paths, 4096):
            digest.update(f"{os.stat(path).st_size}\n".encode())
        for path in spread(paths, 64):
            digest.update(sampled_blocks(Path(os.fsdecode(path)), 4))
        return digest.hexdigest()

    def _image(self, epoch: int, index: int) -> Tensor:
        path = os.fsdecode(self.paths[index])
        try:
            with Image.open(path) as file:
                pixels = v2.functional.pil_to_tensor(file.convert(self.mode))
        except OSError as error:
            raise Refused(f"cannot read the image {path} ({error}): mend or remove it") from error
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
    ) -> None:
        super().__init__(options)
        if augment not in AUGMENTATIONS:
            raise Refused(f"data.augment={augment}: choose one of {', '.join(AUGMENTATIONS)}")
        if source not in (None, "digits"):
            raise Refused(f"data.source={source}: it takes digits, or null for your own folder")
        if not len(mean) == len(std) == channels or channels not in (1, 3):
            raise Refused(
                f"data.channels={channels} takes as many values in data.mean and data.std"
            )
        self.folder, self.source = Path(folder).expanduser(), source
        self.num_classes, self.channels = num_classes, channels
        self.fractions = {"val": val_fraction, "test": test_fraction}
        normalise = [v2.ToDtype(torch.float32, scale=True), v2.Normalize(mean, std)]
        plain = [v2.Resize(image_size, antialias=True), v2.CenterCrop(image_size)]
        self.train_transform = v2.Compose([*_augmentation(augment, image_size), *normalise])
        self.eval_transform = v2.Compose([*plain, *normalise])

    def prepare_data(self) -> None:
        if self.source == "digits":
            build_once(self.folder, write_digits)

    def setup(self, stage: str | None = None) -> None:
        if self.splits:
            return
        files = index_images(self.folder, self.fractions)
        classes = sorted({path.parent.name for path in files["train"]})
        folders = {p.name for p in (self.folder / "train").iterdir() if p.is_dir()}
        if empty := sorted(folders - set(classes)):
            raise Refused(
                f"data.folder={self.folder}: no image of the classes {', '.join(empty)} in train/ "
                "(a broken download?); fill or remove the folder"
            )
        if len(classes) != self.num_classes:
            raise Refused(
                f"data.num_classes={self.num_classes}, but {self.folder / 'train'} holds "
                f"{len(classes)} class folders: set data.num_classes={len(classes)}"
            )
        label_of = {name: label for label, name in enumerate(classes)}
        for split, paths in files.items():
            strange = {path.parent.name for path in paths} - set(classes)
            if strange:
                raise Refused(f"{split}/ holds the class {min(strange)!r}, which train/ has not")
            labels = [label_of[path.parent.name] for path in paths]
            transform = self.train_transform if split == "train" else self.eval_transform
            self.splits[split] = ImageDataset(
                paths, labels, transform, self.channels, self.options.seed
            )


def index_images(folder: Path, fractions: dict[str, float]) -> dict[str, list[Path]]:
    """Image files by split, sorted. A split without a folder is cut from train/ by a hash of each path.

    Raises:
        Refused: when there is no train/ or a split has no image.
    """
    if not (folder / "train").is_dir():
        raise Refused(f"data.folder={folder}: it must hold train/<class>/<image files>")
    files = {split: _files(folder / split) for split in SPLITS if (folder / split).is_dir()}
    low = 0.0
    for split in SPLITS[1:]:
        if split not in files:
            high = low + fractions[split]
            chosen = {p for p in files["train"] if low <= place_of(p, folder) < high}
            files[split] = sorted(chosen)
            files["train"] = [p for p in files["train"] if p not in chosen]
            low = high
    for split, paths in files.items():
        if not paths:
            raise Refused(f"data.folder={folder}: no image for the {split} split")
    return files


def _files(folder: Path) -> list[Path]:
    return sorted(p for p in folder.glob("*/*") if p.suffix.lower() in SUFFIXES and p.is_file())


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
