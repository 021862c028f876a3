"""Tiny models and batches, the same for every test."""

import gc
import os
import shutil
import tempfile

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # waiting threads leave the cores to others
# What tests prepare and fetch stays out of the user's caches.
os.environ["TAPFL_CACHE"] = tempfile.mkdtemp(prefix="tapfl-tests-")
os.environ["HF_DATASETS_CACHE"] = os.environ["TAPFL_CACHE"] + "/datasets"

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # kernels run on the CPU, slowly

from tapfl.config import Config
from tapfl.model.foundation import build_foundation
from tapfl.model.network import build_network
from tapfl.tasks import Batch, Task

torch.set_num_threads(1)  # tests run side by side
os.fsync = lambda descriptor: None  # no test takes the power away, and disks are slow

TINY = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
        "intermediate_size": 64}
FLAVA = {**TINY, "vocab_size": 120, "image_size": 32, "patch_size": 8, "multimodal_layers": 4}
VILT = {**TINY, "num_hidden_layers": 4, "vocab_size": 120, "image_size": 64, "patch_size": 16}
PAIR = {
    "image": {"model_type": "vit", **TINY, "hidden_size": 16, "image_size": 32, "patch_size": 8},
    "text": {"model_type": "bert", **TINY, "num_hidden_layers": 4, "vocab_size": 120},
}
TASKS = {t.name: t for t in (
    Task("pets", "image_classification", ("image",), 5),
    Task("plants", "image_classification", ("image",), 3),
    Task("paint", "image_generation", ("image",)),
    Task("news", "text_classification", ("text",), 4),
    Task("story", "text_generation", ("text",)),
    Task("vqa", "text_generation", ("image", "text")),
)}


def tiny_config(name="flava", **sections):
    architecture = {"flava": FLAVA, "vilt": VILT, "pair": PAIR, "mini": None}[name]
    values = {
        "foundation": {"name": name, "weights": "random", "architecture": architecture},
        "lora": {"encoder_rank": 2, "attention_rank": 3, "expert_rank": 2, "dropout": 0.3},
    }
    for key, fields in sections.items():
        values[key] = values.get(key, {}) | fields
    return Config.model_validate(values)


def randomize(network, seed=0):
    """Give every trainable parameter a value, so that nothing is hidden by a zero."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in network.blocks.parameters():
            noise = torch.randn(parameter.shape, generator=generator) * 0.1
            parameter.add_(noise.to(parameter.device))
    return network


def make_batch(task, size=3, text_length=7, answer_length=6, seed=0):
    """A batch with texts of different lengths."""
    g = torch.Generator().manual_seed(seed)

    def ragged(length):
        ids = torch.randint(5, 120, (size, length), generator=g)
        mask = torch.arange(length) < torch.tensor(
            [max(2, length - i) for i in range(size)])[:, None]
        return ids.masked_fill(~mask, 0), mask

    batch = Batch()
    if "image" in task.modalities:
        batch.image = torch.randint(0, 256, (size, 3, 64, 64), generator=g, dtype=torch.uint8)
    if "text" in task.modalities:
        batch.text, batch.text_mask = ragged(text_length)
    if task.is_classification:
        batch.label = torch.randint(0, task.classes, (size,), generator=g)
    if task.kind == "text_generation":
        batch.answer, batch.answer_mask = ragged(answer_length)
    return batch


def pytest_addoption(parser):
    parser.addoption("--long", action="store_true", help="also run tests that take longer")


def pytest_collection_modifyitems(config, items):
    if not config.getoption("--long"):
        config.hook.pytest_deselected(items=[i for i in items if i.get_closest_marker("long")])
        items[:] = [i for i in items if not i.get_closest_marker("long")]


@pytest.fixture(scope="module", autouse=True)
def frozen():
    """Keep what imports made out of later collections: every run collects garbage."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def cache():
    folder = os.environ["TAPFL_CACHE"]
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="session")
def flava_base():
    return build_foundation(tiny_config().foundation)


@pytest.fixture
def network(flava_base):
    return randomize(build_network(tiny_config(), TASKS, foundation=flava_base)).eval()
