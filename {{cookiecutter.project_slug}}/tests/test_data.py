"""Order, splits and randomness: every sample once, and equal numbers of steps on every rank."""

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from {{ cookiecutter.package_name }}.data.base import LoaderOptions
from {{ cookiecutter.package_name }}.data.images import ImageData
from {{ cookiecutter.package_name }}.data.order import IGNORE, PAD, EvalOrder, TrainOrder
from {{ cookiecutter.package_name }}.data.tokens import TokenData
from {{ cookiecutter.package_name }}.errors import Refused


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("length", [13, 17])
def test_evaluation_sees_each_sample_once(ranks: int, length: int) -> None:
    orders = [EvalOrder(length, 4, rank, ranks) for rank in range(ranks)]
    assert len({len(list(order)) for order in orders}) == 1, "ranks must run equally many batches"
    keys = [key for order in orders for batch in order for key in batch]
    assert all(len(batch) == 4 for order in orders for batch in order)
    assert sorted(index for _, index in keys if index != PAD) == list(range(length))


def test_global_batches_do_not_depend_on_the_layout() -> None:
    def steps(ranks: int, micro: int) -> list[set[int]]:
        orders = [list(TrainOrder(50, 12, micro, rank, ranks, seed=3)) for rank in range(ranks)]
        per_step = 12 // (micro * ranks)
        flat = [
            [b for order in orders for b in order[i : i + per_step]]
            for i in range(0, len(orders[0]), per_step)
        ]
        return [{index for batch in step for _, index in batch} for step in flat]

    one = steps(1, 12)
    assert len(one) == 4 and all(len(step) == 12 for step in one)
    assert one == steps(2, 6) == steps(3, 2) == steps(1, 3)


def test_epochs_differ_and_repeat() -> None:
    order = TrainOrder(50, 10, 10, 0, 1, seed=3)
    first = [i for batch in order for _, i in batch]
    order.set_epoch(1)
    second = [i for batch in order for _, i in batch]
    order.set_epoch(0)
    assert [i for batch in order for _, i in batch] == first != second
    assert sorted(first) == sorted(second) == list(range(50))


def images(folder: Path, **changes: object) -> ImageData:
    values: dict[str, object] = {
        "folder": str(folder), "num_classes": 2, "image_size": 8, "channels": 3, "mean": [0.5] * 3,
        "std": [0.5] * 3, "augment": "standard", "val_fraction": 0.3, "test_fraction": 0.3,
        "options": LoaderOptions(batch_size=4, micro_batch=4),
    }  # fmt: skip
    data = ImageData(**{**values, **changes})  # type: ignore[arg-type]
    data.prepare_data()
    data.setup()
    return data


@pytest.fixture
def own_images(tmp_path: Path) -> Path:
    """A person's own folder: names with blanks and accents, upper-case endings, three formats."""
    random = np.random.default_rng(0)
    for name in ("Größe 1", "b,=(c)"):
        (tmp_path / "train" / name).mkdir(parents=True)
        for number in range(20):
            ending = ("JPG", "png", "webp")[number % 3]
            pixels = random.integers(0, 255, (9, 12, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(tmp_path / "train" / name / f"ä {number}.{ending}")
    return tmp_path


def test_own_folder_is_split_once_and_disjoint(own_images: Path) -> None:
    data = images(own_images)
    paths = {split: set(data.splits[split].paths.tolist()) for split in ("train", "val", "test")}  # type: ignore[attr-defined]
    assert sum(map(len, paths.values())) == 40 and all(paths.values())
    assert not paths["train"] & paths["val"] and not paths["val"] & paths["test"]
    again = images(own_images)
    assert set(again.splits["val"].paths.tolist()) == paths["val"]  # type: ignore[attr-defined]
    (own_images / "train" / "b,=(c)" / "new.png").write_bytes(
        next((own_images / "train" / "b,=(c)").glob("*.png")).read_bytes()
    )
    moved = set(images(own_images).splits["val"].paths.tolist()) ^ paths["val"]  # type: ignore[attr-defined]
    assert len(moved) <= 1, "a new file must not move the others between splits"


def test_augmentation_follows_from_seed_epoch_and_index(own_images: Path) -> None:
    dataset = images(own_images).splits["train"]
    first, labels = dataset[[(0, 1), (0, 1), (1, 1), (0, 2)]]
    assert (
        first.shape == (4, 3, 8, 8) and first.dtype == torch.float32 and labels.dtype == torch.int64
    )
    assert torch.equal(first[0], first[1]) and not torch.equal(first[0], first[2])
    state = torch.get_rng_state()
    assert torch.equal(dataset[[(0, 1)]][0][0], first[0])
    assert torch.equal(torch.get_rng_state(), state), (
        "loading must leave the model's random state alone"
    )


def test_padding_is_labelled_ignore(own_images: Path) -> None:
    _, labels = images(own_images).splits["val"][[(0, 0), (0, PAD)]]
    assert labels[0] >= 0 and labels[1] == IGNORE


def test_bad_folders_are_named(own_images: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    with pytest.raises(Refused, match="set data.num_classes=2"):
        images(own_images, num_classes=3)
    with pytest.raises(Refused, match="train/<class>"):
        images(tmp_path_factory.mktemp("empty"))
    with pytest.raises(Refused, match="standard"):
        images(own_images, augment="wild")
    (own_images / "train" / "empty").mkdir()
    with pytest.raises(Refused, match="no image of the classes empty"):
        images(own_images)
    (own_images / "train" / "empty").rmdir()
    next((own_images / "train" / "Größe 1").glob("*.JPG")).write_bytes(b"not a picture")
    data = images(own_images)
    with pytest.raises(Refused, match="cannot read .*JPG.*on_error=skip"):
        for split in data.splits.values():
            split[[(0, index) for index in range(len(split))]]


def tokens(
    folder: Path, source: Path | str, length: int = 8, options: LoaderOptions | None = None
) -> TokenData:
    options = options or LoaderOptions(batch_size=2, micro_batch=2)
    data = TokenData(str(folder), str(source), 256, length, 0.3, 0.3, options)
    data.prepare_data()
    data.setup()
    return data


@pytest.fixture
def own_text(tmp_path: Path) -> Path:
    source = tmp_path / "source"
    source.mkdir()
    for number in range(30):
        (source / f"{number}.txt").write_text(
            f"document {number}: " + "héllo wörld " * 9, encoding="utf-8"
        )
    return source


def test_targets_are_the_inputs_one_token_on(own_text: Path, tmp_path: Path) -> None:
    data = tokens(tmp_path / "tokens", own_text)
    inputs, targets = data.splits["train"][[(0, 0), (0, 1)]]
    assert inputs.shape == targets.shape == (2, 8)
    assert torch.equal(inputs[0, 1:], targets[0, :-1]) and targets[0, -1] == inputs[1, 0]
    shifted, _ = data.splits["train"][[(1, 0), (1, 1)]]
    assert not torch.equal(inputs, shifted), "another epoch cuts elsewhere"


def test_one_long_text_is_cut_by_position(tmp_path: Path) -> None:
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "input.txt").write_text("".join(f"line {n}\n" for n in range(900)))
    data = tokens(tmp_path / "tokens", tmp_path / "source")
    texts = [bytes(split.tokens.astype(np.uint8)).decode() for split in data.splits.values()]  # type: ignore[attr-defined]
    assert "".join(texts).startswith("line 0\nline 1\n") and "line 899" in texts[2]
    assert "line 0\n" not in texts[1] + texts[2] and len(texts[1]) == len(texts[2])


def test_every_document_is_in_one_split(own_text: Path, tmp_path: Path) -> None:
    data = tokens(tmp_path / "tokens", own_text)
    texts = [bytes(split.tokens.astype(np.uint8)).decode() for split in data.splits.values()]  # type: ignore[attr-defined]
    for number in range(30):
        assert sum(f"document {number}:" in text for text in texts) == 1


def test_bad_text_is_named(own_text: Path, tmp_path: Path) -> None:
    with pytest.raises(Refused, match="no text"):
        tokens(tmp_path / "none", tmp_path / "nowhere")
    assert not (tmp_path / "none").exists(), "a refused data set must not leave half a folder"
    with pytest.raises(Refused, match="shorter model.context_length"):
        tokens(tmp_path / "long", own_text, length=100_000)
    tokens(tmp_path / "tokens", own_text)
    with pytest.raises(Refused, match="was made from"):
        tokens(tmp_path / "tokens", "stdlib")
    with pytest.raises(Refused, match="was made from"):
        TokenData(
            str(tmp_path / "tokens"), str(own_text), 256, 8, 0.1, 0.3, LoaderOptions(2, 2)
        ).setup()


def test_a_batch_larger_than_the_data_is_refused(own_images: Path) -> None:
    data = images(own_images, options=LoaderOptions(batch_size=512, micro_batch=512))
    with pytest.raises(Refused, match="batch_size=512"):
        data.train_dataloader()
