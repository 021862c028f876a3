"""A miniature world: eight small data sets that mirror the paper's eight, made from a seed.

Nothing is downloaded. The pictures are drawn, the texts are written by small grammars; samples of
training and test never coincide. The data sets have the names of those that they replace.
"""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tapfl.data import templates
from tapfl.data.drawing import (
    COLORS,
    GARMENTS,
    SHAPES,
    SIDE,
    TEXTURES,
    Rng,
    Y,
    backdrop,
    by_kind,
    column,
    finish,
    garment,
    paint,
    place,
    shape_mask,
    texture,
    tint,
)
from tapfl.data.samples import Samples
from tapfl.errors import TapflError, nearest


def generate(name: str, train: int, test: int, seed: int) -> tuple[Samples, Samples]:
    """Make a data set: ``train`` and ``test`` samples that have no sample in common."""
    if name not in DATASETS:
        raise TapflError(f"the miniature world has no data set '{name}'" + nearest(name, DATASETS))
    rng = np.random.default_rng([seed, zlib.crc32(name.encode())])
    samples = DATASETS[name](rng, train + test)
    return samples.slice(0, train), samples.slice(train, train + test)


def _shapes(rng: Rng, count: int) -> Samples:
    """Image classification by shape; colour, place, size and angle do not matter."""
    labels = rng.integers(len(SHAPES), size=count)
    x, y = place(rng, count, rng.uniform(-.45, .45, count), rng.uniform(-.45, .45, count),
                  rng.uniform(.3, .6, count), .5)
    mask = by_kind(shape_mask, labels, x, y)
    image = paint(mask, tint(rng, rng.integers(len(COLORS), size=count)),
                   backdrop(rng, count))
    return Samples(images=finish(rng, image, .08), labels=labels.tolist(), classes=SHAPES)


def _textures(rng: Rng, count: int) -> Samples:
    """Image classification by pattern; the two colours and the scale do not matter."""
    labels = rng.integers(len(TEXTURES), size=count)
    x, y = place(rng, count, rng.uniform(-1, 1, count), rng.uniform(-1, 1, count),
                  rng.uniform(.3, .6, count), .15)
    pattern = by_kind(texture, labels, x, y)
    first, second = rng.integers(len(COLORS), size=(2, count))
    second = np.where(first == second, (second + 1) % len(COLORS), second)
    image = paint(pattern, tint(rng, first), np.broadcast_to(
        tint(rng, second)[:, :, None, None], (count, 3, SIDE, SIDE)))
    return Samples(images=finish(rng, image, .12), labels=labels.tolist(), classes=TEXTURES)


def _garments(rng: Rng, count: int) -> Samples:
    """Reconstruction of grey garments on black."""
    kinds = rng.integers(len(GARMENTS), size=count)
    x, y = place(rng, count, rng.uniform(-.15, .15, count), rng.uniform(-.1, .1, count),
                  rng.uniform(.6, .9, count), .1)
    mask = by_kind(garment, kinds, x, y) * column(rng.uniform(.4, 1, count))
    return Samples(images=finish(rng, np.repeat(mask[:, None], 3, axis=1), .03))


def _scenes(rng: Rng, count: int) -> Samples:
    """Reconstruction of coloured figures, one large and one small, over a sky and a ground."""
    horizon = column(rng.uniform(-.2, .4, count))[:, None]
    sky, ground = (rng.uniform(.1, .9, (count, 3, 1, 1)).astype(np.float32) for _ in range(2))
    image = np.where(Y[None] < horizon, sky + .2 * Y[None], ground)
    for low, high in ((.45, .7), (.2, .3)):
        x, y = place(rng, count, rng.uniform(-.5, .5, count), rng.uniform(-.5, .5, count),
                      rng.uniform(low, high, count), .6)
        mask = by_kind(shape_mask, rng.integers(len(SHAPES), size=count), x, y)
        image = paint(mask, tint(rng, rng.integers(len(COLORS), size=count)), image)
    return Samples(images=finish(rng, image, .03))


TOPICS = {
    "world": "minister treaty border embassy refugees parliament ceasefire election sanctions "
             "summit protest diplomat army president peace",
    "sports": "striker coach tournament goal stadium medal referee season league champion sprint "
              "defender trophy fans match",
    "business": "shares profit merger bank market investors dividend tariff retailer revenue loan "
                "startup price export budget",
    "science": "telescope genome particle satellite vaccine fossil neuron enzyme laser climate "
               "robot software orbit protein sensor",
}
_PLAIN = ("group city week leader plan talks team report result record year statement "
          "member night crowd deal study change public").split()
_VERBS = ("praised questioned delayed announced discussed expected followed changed missed "
          "joined").split()


def _news(rng: Rng, count: int) -> Samples:
    """Topic classification: most topical words belong to the topic, some to another one."""
    words = [topic.split() for topic in TOPICS.values()]

    def one() -> tuple[str, int]:
        label = int(rng.integers(4))
        told = list(rng.choice(words[label], 3, replace=False))
        other = words[(label + int(rng.integers(1, 4))) % 4]
        told += list(rng.choice(other, int(rng.integers(1, 3)), replace=False))
        rng.shuffle(told)
        told += list(rng.choice(_PLAIN, 7 - len(told), replace=False))
        verbs = rng.choice(_VERBS, 2, replace=False)
        title = f"{told[5]} {verbs[0]} {told[0]} and {told[1]}"
        return f"{title}. the {told[2]} {verbs[1]} the {told[3]} after a {told[4]} {told[6]}", label

    texts, labels = zip(*_unique(one, count), strict=True)
    return Samples(texts=list(texts), labels=list(labels), classes=tuple(TOPICS))


_CATEGORIES = {
    "fruit": "apple pear plum grape cherry lemon mango banana".split(),
    "animal": "horse tiger rabbit eagle salmon spider camel goat".split(),
    "tool": "hammer saw drill wrench shovel ladder brush pliers".split(),
    "vehicle": "truck bicycle tram ferry rocket tractor canoe scooter".split(),
}
_OPPOSITES = dict(zip(
    "hot big fast wet loud dark heavy early full soft".split(),
    "cold small slow dry quiet bright light late empty hard".split(), strict=True))
_OPPOSITES |= {v: k for k, v in _OPPOSITES.items()}


def _quiz(rng: Rng, count: int) -> Samples:
    """Multiple choice in three subjects: kinds of things, opposites, counting."""
    def choose(right: str, wrong: Sequence[str]) -> tuple[list[str], int]:
        choices = [right, *rng.choice([w for w in wrong if w != right], 3, replace=False)]
        rng.shuffle(choices)
        return [str(c) for c in choices], choices.index(right)

    def one() -> tuple[str, str]:
        subject = rng.choice(["things", "opposites", "numbers"])
        if subject == "things":
            kind = str(rng.choice(list(_CATEGORIES)))
            right = str(rng.choice(_CATEGORIES[kind]))
            wrong = [w for k, ws in _CATEGORIES.items() if k != kind for w in ws]
            question = f"which of these is a {kind}?"
        elif subject == "opposites":
            word = str(rng.choice(list(_OPPOSITES)))
            right, wrong = _OPPOSITES[word], [w for w in _OPPOSITES if w != word]
            question = f"what is the opposite of {word}?"
        else:
            number = int(rng.integers(2, 40))
            right, wrong = str(number + 1), [str(n) for n in range(1, 45) if n != number]
            question = f"which number comes after {number}?"
        choices, answer = choose(right, wrong)
        return templates.mmlu(str(subject), question, choices, answer)

    return _answered(_unique(one, count))


def _questions(rng: Rng, count: int) -> Samples:
    """Questions about two figures: neither picture nor question alone gives the answer."""
    images, figures = _two_figures(rng, count)
    pairs = []
    for both in figures:
        side = int(rng.integers(2))
        color, shape = both[side]
        pairs.append(templates.vqa(*[
            (f"what color is the {shape}?", color),
            (f"which shape is {color}?", shape),
            (f"on which side is the {shape}?", ("left", "right")[side]),
        ][int(rng.integers(3))]))
    samples = _answered(pairs)
    samples.images = images
    return samples


def _two_figures(rng: Rng, count: int) -> tuple[NDArray[np.uint8], list[list[tuple[str, str]]]]:
    """Draw a figure on the left and one on the right; return their colours and shapes too."""
    names = list(COLORS)
    shapes = np.array([rng.choice(len(SHAPES), 2, replace=False) for _ in range(count)])
    colors = np.array([rng.choice(len(names), 2, replace=False) for _ in range(count)])
    image = backdrop(rng, count)
    for side in range(2):
        x, y = place(rng, count, rng.uniform(-.5, -.42, count) * (1 - 2 * side),
                      rng.uniform(-.3, .3, count), rng.uniform(.36, .44, count), .2)
        image = paint(by_kind(shape_mask, shapes[:, side], x, y), tint(rng, colors[:, side]),
                       image)
    told = [[(names[c], SHAPES[s]) for c, s in zip(paint, pair, strict=True)]
            for paint, pair in zip(colors, shapes, strict=True)]
    return finish(rng, image, .05), told


_ACTORS = ("girl boy dog cat farmer teacher nurse sailor painter clown soldier grandmother monkey "
           "robot child").split()
_OBJECTS = {"ball": "kicks", "book": "reads", "song": "sings", "cake": "eats", "car": "drives",
            "letter": "writes", "tree": "climbs", "picture": "paints", "window": "opens",
            "drum": "plays", "fish": "catches", "bag": "carries", "kite": "flies",
            "floor": "sweeps"}
_PLACES = {"park": "in", "beach": "at", "street": "on", "kitchen": "in", "station": "at",
           "roof": "on", "garden": "in", "market": "at", "bridge": "on", "school": "at",
           "forest": "in", "boat": "on"}


def _concepts(rng: Rng, count: int) -> Samples:
    """From three concepts to a sentence; the verb and the preposition must be known."""
    combinations = list(itertools.product(_ACTORS, _OBJECTS, _PLACES))
    if count > len(combinations):
        raise TapflError(f"the miniature commongen has {len(combinations)} samples, "
                         f"asked for {count}")
    pairs = []
    for index in rng.permutation(len(combinations))[:count]:
        actor, thing, place = combinations[index]
        sentence = f"the {actor} {_OBJECTS[thing]} the {thing} {_PLACES[place]} the {place}"
        order = [actor, thing, place]
        rng.shuffle(order)
        pairs.append(templates.commongen(order, sentence))
    return _answered(pairs)


def _unique(make: Callable[[], tuple[Any, ...]], count: int) -> list[tuple[Any, ...]]:
    """Call ``make`` until there are ``count`` samples with different texts."""
    found: dict[str, tuple[Any, ...]] = {}
    for _ in range(100 * count):
        sample = make()
        found.setdefault(sample[0], sample)
        if len(found) == count:
            return list(found.values())
    raise TapflError(f"the miniature world cannot make {count} different samples")


def _answered(pairs: Sequence[tuple[str, ...]]) -> Samples:
    prompts, answers = zip(*pairs, strict=True)
    return Samples(texts=list(prompts), answers=list(answers))


DATASETS: dict[str, Callable[[Rng, int], Samples]] = {
    "tiny-imagenet": _shapes, "cifar100": _textures, "fmnist": _garments, "caltech256": _scenes,
    "agnews": _news, "mmlu": _quiz, "vqa": _questions, "commongen": _concepts,
}


def unlabelled(rng: Rng, count: int) -> tuple[Samples, Samples, Samples]:
    """Return pictures with captions, pictures and texts, without labels: to pre-train on."""
    images, figures = _two_figures(rng, count)
    captions = [f"a {a[0]} {a[1]} on the left and a {b[0]} {b[1]} on the right" for a, b in figures]
    quarter = -(-count // 4)
    drawn = [draw(rng, quarter).images for draw in (_shapes, _textures, _garments, _scenes)]
    third = min(-(-count // 3), 2000)  # the world has some 2,500 sentences about concepts
    sentences = [str(a).removeprefix("Description: ") for a in _concepts(rng, third).answers or []]
    texts = [*sentences, *(_news(rng, third).texts or []), *(_quiz(rng, third).texts or [])]
    return (Samples(images=images, texts=captions),
            Samples(images=np.concatenate([d for d in drawn if d is not None])),
            Samples(texts=texts))


def words() -> list[str]:
    """Return every word the world can say, for the tokenizer."""
    rng = np.random.default_rng(0)
    texts = []
    for make in (_news, _quiz, _questions, _concepts):
        samples = make(rng, 1500)
        texts += [*(samples.texts or []), *(samples.answers or [])]
    found = {w for text in texts for w in text.lower().replace("\n", " ").split(" ")}
    plain = {w.strip(".,:?()") for w in found}
    listed = [*COLORS, *SHAPES, *TEXTURES, *GARMENTS, *_ACTORS, *_OBJECTS, *_PLACES, *_OPPOSITES,
              *_OBJECTS.values(), *(w for ws in _CATEGORIES.values() for w in ws),
              *(str(n) for n in range(46)), "left", "right"]
    return sorted({p for w in plain | set(listed) for p in w.split("-") if len(p) > 1})
