"""The embedded image data: scikit-learn's handwritten digits as an ordinary folder of PNG files."""

from pathlib import Path

import numpy as np
from PIL import Image


def write_digits(folder: Path) -> None:
    """Write `train|val|test/<digit>/<number>.png`: 1,797 grey images of 8 x 8, 70/15/15 % per class.

    Source: E. Alpaydin and C. Kaynak, Optical Recognition of Handwritten Digits (UCI, 1998), as
    shipped with scikit-learn.
    """
    from sklearn.datasets import load_digits

    digits = load_digits()
    pixels = (digits.images * (255 / 16)).round().astype(np.uint8)
    seen = dict.fromkeys(range(10), 0)
    for number, (image, label) in enumerate(zip(pixels, digits.target.tolist(), strict=True)):
        place = (
            seen[label] % 20
        )  # round robin inside each class: every split holds every class evenly
        seen[label] += 1
        split = "train" if place < 14 else "val" if place < 17 else "test"
        target = folder / split / str(label)
        target.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image).save(target / f"{number:04d}.png")
