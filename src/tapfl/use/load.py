"""A client's model, ready to predict."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tapfl.blocks import BlockState
from tapfl.data.batches import TaskData, Texts
from tapfl.data.custom import DataEntry
from tapfl.data.federation import Member
from tapfl.data.prepare import picture
from tapfl.data.prompts import prompt
from tapfl.engine.build import set_speed
from tapfl.engine.registry import find_plan
from tapfl.engine.run import pick_device
from tapfl.errors import TapflError, as_tapfl_error, nearest
from tapfl.evaluation.evaluate import Evaluator
from tapfl.federated.context import Context
from tapfl.methods import RunSpec
from tapfl.model.foundation import build_foundation, load_tokenizer
from tapfl.tasks import Task
from tapfl.use.card import CARD, PERSONAL, Card, card_of, exported_card


def load(run: Path | str, client: str | None = None, model: str | None = None,
         method: str | None = None, device: str = "auto", modules: Path | str | None = None,
         weights: str | None = None) -> ClientModel:
    """Load a client's model from a run, or from a folder that ``tapfl export`` wrote.

    ``model`` is ``personal`` (TAP's X, a post-trained model, ...; the default) or ``federated``
    (its W); ``method`` names one of the run's methods instead. A federated method of your own is
    imported from ``modules`` alone: a record from elsewhere cannot name code. ``weights`` is where
    the frozen base is found, if it is not where it was.
    """
    folder = Path(run)
    if (folder / CARD).is_file():
        card = exported_card(folder)
        for option, asked, there in (("client", client, card.client),
                                     ("method", method, card.method), ("model", model, None)):
            if asked not in (None, there):
                raise TapflError(f"--{option} {asked}: {folder} holds one model, that of client "
                                 f"{card.client} by {card.method}")
    else:
        card = card_of(folder, client, model or PERSONAL, method)
    if weights is not None:
        card = card.with_weights(weights)
    return ClientModel(card, pick_device(device), None if modules is None else Path(modules))


class ClientModel:
    """A client's model, ready to predict: only the encoders and stacks of its tasks are built."""

    def __init__(self, card: Card, device: str = "cpu", modules: Path | None = None) -> None:
        self.card, self.device = card, device
        self.tasks: dict[str, Task] = card.file.task_table()
        for name, names in card.classes.items():
            if name in self.tasks and len(names) != self.tasks[name].classes:
                raise TapflError(f"task '{name}': {len(names)} names for "
                                 f"{self.tasks[name].classes} classes")
        if ":" in card.federated and modules is None:
            raise TapflError(f"{card.federated}: a method of your own; name the folder it is "
                             "imported from with --modules DIR")
        config = card.config
        run = RunSpec(card.federated, card.federated, config, None, ())
        method = find_plan(run, modules, installed=False).method
        modalities = sorted({m for task in self.tasks.values() for m in task.modalities})
        foundation = build_foundation(config.foundation, modalities,
                                      config.backbone.layers_per_stage, device)
        set_speed(foundation, config, device, clients=0)
        self._method = method(Context(config, self.tasks, foundation, device))
        self.network = self._method.network
        self.state = self._load()
        self.tokenizer = load_tokenizer(config.foundation)
        self._evaluator = Evaluator(self.tokenizer, config.evaluation, device)

    def _load(self) -> BlockState:
        """Copy the blocks in; a server's file holds those of other clients, too."""
        member = Member(self.card.client, 0, tuple(self.tasks), samples=0)
        owned = {*self._method.exchanged(member), *self._method.owned(member)}
        private = set(self._method.private(member))
        state = self.card.read_blocks()
        kept = state.subset([name for name in state if name in owned | private])
        missing = sorted(owned - set(kept))
        fault = (f"block '{missing[0]}' is missing" if missing
                 else kept.misfit(self._method.initial.to("cpu")) or kept.not_finite())
        if fault:
            raise TapflError(f"{self.card.blocks}: {fault}")
        kept.load_into(self.network.blocks)
        # As in the run: a model with all the method's blocks predicts the method's way.
        self._whole = set(kept) == owned | private
        return kept

    def task(self, name: str) -> Task:
        """Return one of the client's tasks."""
        if name not in self.tasks:
            raise TapflError(f"--task: client '{self.card.client}' has no task '{name}'"
                             + nearest(name, self.tasks))
        return self.tasks[name]

    def predict(self, task: str, image: Any = None, text: Any = None) -> Any:
        """Answer one input, or a list of them with a list of answers; see ``predict_many``."""
        many = [value for value in (image, text)
                if isinstance(value, list | tuple) or getattr(value, "ndim", 0) == 4]
        if many:
            return self.predict_many(task, image, text)
        return self.predict_many(task, None if image is None else [image],
                                 None if text is None else [text])[0]

    @torch.no_grad()
    def predict_many(self, task: str, images: Sequence[Any] | None = None,
                     texts: Sequence[str | Mapping[str, Any]] | None = None,
                     ) -> list[dict[str, Any]]:
        """Answer many inputs: pictures and texts, as the task takes them.

        A picture is a file, its bytes, one of PIL's, or an array of pixels (height by width, by 3
        where it has colours): bytes, or numbers from 0 to 1.

        A text may be a mapping of the columns that the task's template names. An answer has
        ``label`` and ``probabilities``, ``text``, or ``image`` (a uint8 array, height by width
        by 3).
        """
        spec = self.task(task)
        data = self._data(spec, images, texts)
        self.network.eval()
        predicting = (self._method.predicting() if self._whole else contextlib.nullcontext())
        with predicting:
            if spec.kind == "text_generation":
                return [{"text": written} for written in self._evaluator.write(self.network, data)]
            found = data.in_batches(
                self.card.config.evaluation.batch_size,
                lambda _, batch: self.network(task, batch).prediction.float().cpu())
        prediction = torch.cat(found)
        if spec.is_classification:
            return [self._labelled(task, row) for row in prediction.softmax(dim=-1)]
        return [{"image": image} for image in self._pixels(prediction)]

    def _labelled(self, task: str, probabilities: torch.Tensor) -> dict[str, Any]:
        names = self.card.classes.get(task) or [str(i) for i in range(len(probabilities))]
        pairs = sorted(zip(names, probabilities.tolist(), strict=True), key=lambda pair: -pair[1])
        return {"label": pairs[0][0], "probabilities": dict(pairs)}

    def _pixels(self, images: torch.Tensor) -> Any:
        normalize = self.network.normalize
        pixels = images * normalize.std.cpu() + normalize.mean.cpu()
        return pixels.round().clamp(0, 255).byte().permute(0, 2, 3, 1).numpy()

    def _data(self, task: Task, images: Sequence[Any] | None,
              texts: Sequence[str | Mapping[str, Any]] | None) -> TaskData:
        given = {"image": images, "text": texts}
        for modality, values in given.items():
            if (modality in task.modalities) != (values is not None):
                needed = " and ".join(task.modalities)
                raise TapflError(f"task '{task.name}' takes {needed}: "
                                 f"{'got no' if values is None else 'it has no use for'} "
                                 f"{modality}")
        counts = {len(values) for values in given.values() if values is not None}
        if len(counts) != 1 or 0 in counts:
            raise TapflError(f"task '{task.name}': expected as many pictures as texts, "
                             "and at least one")
        data = TaskData(task)
        if images is not None:
            data.images = torch.stack([torch.from_numpy(_picture(image)) for image in images])
        if texts is not None:
            data.text = Texts.of([self._prompt(task, text) for text in texts], self.tokenizer,
                                 self.network.foundation.max_text)
        return data.to(self.device)

    def image_column(self, task: Task, record: Mapping[str, Any]) -> str:
        """Return where a record has its picture: as in the client's own data, or ``image``."""
        entry = self._entry(task)
        return entry.image if entry and entry.image in record else "image"

    def _entry(self, task: Task) -> DataEntry | None:
        holding = self.card.file.clients[0].tasks[task.name]
        return holding if isinstance(holding, DataEntry) else self.card.file.tasks[task.name].data

    def _prompt(self, task: Task, text: str | Mapping[str, Any]) -> str:
        values = {"text": text} if isinstance(text, str) else text
        return prompt(task.name, values, self._entry(task))


def _picture(image: Any) -> Any:
    name = image if isinstance(image, str | Path) else "image"
    with as_tapfl_error(f"{name}: not a readable picture"):
        if hasattr(image, "__array_interface__"):
            return picture(_from_array(np.asarray(image)))
        return picture(Path(image) if isinstance(image, str) else image)


def _from_array(pixels: Any) -> Any:
    """Return an array of pixels as one of PIL's pictures."""
    from PIL import Image

    if pixels.ndim not in (2, 3) or (pixels.ndim == 3 and pixels.shape[2] not in (3, 4)):
        raise ValueError(f"an array of shape {pixels.shape}, expected (height, width[, 3])")
    if pixels.dtype.kind == "f":
        if not (np.isfinite(pixels).all() and pixels.min() >= 0 and pixels.max() <= 1):
            raise ValueError("numbers outside 0 to 1")
        pixels = (255 * pixels).round()
    elif pixels.dtype != np.uint8:
        raise ValueError(f"an array of {pixels.dtype}, expected uint8 or numbers from 0 to 1")
    return Image.fromarray(pixels.astype(np.uint8))
