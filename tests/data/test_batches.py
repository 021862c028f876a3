"""A task's samples, and their digest."""

import numpy as np
import torch

from tapfl.data.batches import TaskData, Texts
from tapfl.tasks import Task

LETTERS = Task("code", "text_classification", ("text",), 2)


def data_of(texts=((1, 2, 3), (4, 5)), width=3, pad=0, **more):
    ids = np.full((len(texts), width), pad, dtype=np.int32)
    for row, words in zip(ids, texts, strict=True):
        row[:len(words)] = words
    lengths = np.array([len(words) for words in texts])
    return TaskData(LETTERS, text=Texts(torch.from_numpy(ids), lengths), **more)


def test_a_digest_is_of_content_and_order():
    images = torch.arange(2 * 3 * 4 * 4, dtype=torch.uint8).reshape(2, 3, 4, 4)
    swapped = images.clone()
    swapped[0, 0, 0, 0], swapped[0, 0, 0, 1] = images[0, 0, 0, 1], images[0, 0, 0, 0]
    labels = torch.tensor([0, 1])
    made = [data_of(), data_of(((4, 5), (1, 2, 3))), data_of(((2, 1, 3), (4, 5))),
            data_of(((1, 2), (3, 4, 5))), data_of(labels=labels), data_of(labels=labels.flip(0)),
            data_of(images=images), data_of(images=swapped), data_of(images=images.flip(0)),
            data_of(images=images.reshape(2, 3, 2, 8)), data_of(references=["a", "b"]),
            data_of(references=["b", "a"]), data_of(references=["ab", ""]),
            data_of(classes=("a", "b")), TaskData(LETTERS, answers=data_of().text),
            TaskData(LETTERS), TaskData(LETTERS, images=images[:0])]
    digests = [data.digest() for data in made]
    assert len(set(digests)) == len(made) - 1  # none, and none at all, are alike
    assert digests == [data.digest() for data in made]
    assert data_of(width=9, pad=7).digest() == data_of().digest()
