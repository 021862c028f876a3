"""Random samples in the sizes and lengths of the paper's data sets: only to measure speed.

They are made as tensors, without files, drawing or tokenizing. There is nothing to learn in them.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tapfl.config import DataConfig
from tapfl.data.batches import Rows, TaskData, Texts
from tapfl.tasks import TEXT_GENERATION, Task

IMAGE = (3, 64, 64)
FIRST_WORD = 5  # the ids below are special tokens
MAX_REFERENCES = 2000  # test samples of text generation: their answers are written out


@dataclass(frozen=True)
class Lengths:
    """How many tokens texts have: log-normal around the median, within bounds."""

    median: float
    sigma: float
    low: int
    high: int

    def draw(self, rng: np.random.Generator, count: int, limit: int) -> Rows:
        """Return the lengths of ``count`` texts; what is longer than ``limit`` is cut."""
        drawn = np.rint(self.median * np.exp(self.sigma * rng.standard_normal(count)))
        return np.clip(drawn, self.low, self.high).clip(2, limit).astype(np.int64)


ANY_LENGTH = Lengths(64, 0, 64, 64)


@dataclass(frozen=True)
class Shape:
    """A data set's splits and the lengths of its texts."""

    train: int = 10_000
    test: int = 1_000
    text: Lengths = ANY_LENGTH
    answer: Lengths = ANY_LENGTH


# Lengths are those of the paper's templates in word pieces, [CLS] and [SEP] included.
SHAPES = {
    "tiny-imagenet": Shape(100_000, 10_000),
    "cifar100": Shape(50_000, 10_000),
    "fmnist": Shape(60_000, 10_000),
    "caltech256": Shape(24_485, 6_122),
    "agnews": Shape(120_000, 7_600, text=Lengths(50, 0.25, 8, 256)),
    "mmlu": Shape(2_711, 301, Lengths(160, 0.6, 40, 1024), Lengths(10.5, 0.15, 8, 14)),
    "vqa": Shape(17_148, 4_287, Lengths(10.8, 0.22, 8, 24), Lengths(8, 0.18, 6, 12)),
    "commongen": Shape(67_389, 4_018, Lengths(18, 0.13, 14, 24), Lengths(14.5, 0.26, 8, 30)),
}


def generate(config: DataConfig, task: Task, tokenizer: Any, max_text: int,
             device: str) -> tuple[TaskData, TaskData]:
    """Make both splits of a task's data set, on the device; a name not listed gets a plain one.

    The same seed gives the same samples, except for images, which differ between kinds of devices.
    """
    shape = SHAPES.get(task.name, Shape())
    test = min(shape.test, MAX_REFERENCES) if task.kind == TEXT_GENERATION else shape.test
    sizes = (min(shape.train, config.train or shape.train), min(test, config.test or test))
    train, test_split = (
        _Maker(config.seed, f"{task.name}/{split}", tokenizer, max_text, device)
        .make(task, shape, size)
        for split, size in zip(("train", "test"), sizes, strict=True))
    if test_split.answers is not None:
        test_split.references = tokenizer.batch_decode(
            test_split.answers.ids.tolist(), skip_special_tokens=True)
    return train, test_split


class _Maker:
    """Draws the parts of one split."""

    def __init__(self, seed: int, split: str, tokenizer: Any, max_text: int, device: str) -> None:
        self.tokenizer, self.max_text, self.device = tokenizer, max_text, device
        self.seed = np.random.SeedSequence([seed, zlib.crc32(split.encode())])
        self.rng = np.random.Generator(np.random.SFC64(self.seed))
        words = np.arange(FIRST_WORD, len(tokenizer), dtype=np.int32)
        self.words = words[~np.isin(words, tokenizer.all_special_ids)]

    def make(self, task: Task, shape: Shape, count: int) -> TaskData:
        """Return ``count`` samples of a task."""
        data = TaskData(task)
        if "text" in task.modalities:
            data.text = self._texts(shape.text, count)
        if task.is_classification:
            data.labels = torch.from_numpy(self.rng.integers(task.classes, size=count))
        if task.kind == TEXT_GENERATION:
            data.answers = self._texts(shape.answer, count)
        data.to(self.device)
        if "image" in task.modalities:
            data.images = self._images(count)
        return data

    def _texts(self, lengths: Lengths, count: int) -> Texts:
        """Return texts of words from the whole vocabulary, between [CLS] and [SEP]."""
        drawn = lengths.draw(self.rng, count, self.max_text)
        ids = np.full((count, int(drawn.max())), self.tokenizer.pad_token_id, dtype=np.int32)
        chosen = self.rng.integers(len(self.words), size=int(drawn.sum()), dtype=np.int32)
        ids[np.arange(ids.shape[1]) < drawn[:, None]] = self.words[chosen]
        ids[:, 0] = self.tokenizer.cls_token_id
        ids[np.arange(count), drawn - 1] = self.tokenizer.sep_token_id
        return Texts(torch.from_numpy(ids), drawn)

    def _images(self, count: int) -> Tensor:
        """Return noise: a gigabyte of it takes half a second on a CPU, nothing on a GPU."""
        if self.device.startswith("cuda"):
            generator = torch.Generator(device=self.device)
            generator.manual_seed(int(self.seed.generate_state(1)[0]))
            return torch.randint(0, 256, (count, *IMAGE), dtype=torch.uint8, device=self.device,
                                 generator=generator)
        eights = self.rng.integers(0, 2**64 - 1, size=count * int(np.prod(IMAGE)) // 8,
                                   dtype=np.uint64, endpoint=True)
        return torch.from_numpy(eights.view(np.uint8)).view(count, *IMAGE)
