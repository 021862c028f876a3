"""Draw figures, patterns and garments: all samples of a kind at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

Rng = np.random.Generator
Pixels = NDArray[np.float32]
SIDE = 64

COLORS = {"red": (.85, .15, .15), "green": (.15, .7, .2), "blue": (.15, .25, .85),
          "yellow": (.9, .85, .15), "purple": (.6, .2, .7), "orange": (.95, .55, .1),
          "white": (.95, .95, .95), "cyan": (.1, .8, .85)}
SHAPES = ("circle", "square", "triangle", "cross", "ring", "diamond", "bar", "star")
TEXTURES = ("rows", "columns", "diagonals", "checks", "dots", "waves", "rings", "rays", "grid",
            "bricks")
GARMENTS = ("shirt", "trousers", "dress", "bag", "boot")

# Coordinates from -1 to 1, y downwards.
Y, X = (a.astype(np.float32)[None] for a in np.mgrid[-1:1:SIDE * 1j, -1:1:SIDE * 1j])


def column(values: Any) -> Pixels:
    """Return one value per sample, in a shape that broadcasts over the coordinates."""
    return np.asarray(values, dtype=np.float32)[:, None, None]


def place(rng: Rng, count: int, x: Any, y: Any, size: Any, turn: float) -> tuple[Pixels, Pixels]:
    """Return coordinates around each sample's own centre, scaled and turned."""
    angle = column(rng.uniform(-turn, turn, count))
    dx, dy = (X - column(x)) / column(size), (Y - column(y)) / column(size)
    return (dx * np.cos(angle) + dy * np.sin(angle), dy * np.cos(angle) - dx * np.sin(angle))


def shape_mask(kind: int, x: Pixels, y: Pixels) -> NDArray[np.bool_]:
    """Return where the shape is, in its own coordinates."""
    radius, box = np.hypot(x, y), np.maximum(abs(x), abs(y))
    angle = np.arctan2(y, x)
    parts: dict[str, Callable[[], Any]] = {
        "circle": lambda: radius < .9,
        "square": lambda: box < .75,
        "triangle": lambda: (y < .7) & (y > 2 * abs(x) - .9),
        "cross": lambda: (box < .9) & (np.minimum(abs(x), abs(y)) < .28),
        "ring": lambda: (radius < .95) & (radius > .55),
        "diamond": lambda: abs(x) + abs(y) < 1,
        "bar": lambda: (abs(x) < 1) & (abs(y) < .3),
        "star": lambda: radius < .55 + .4 * np.cos(5 * angle),
    }
    return np.asarray(parts[SHAPES[kind]]())


def texture(kind: int, x: Pixels, y: Pixels) -> Pixels:
    """Return a pattern between 0 and 1."""
    tau = np.float32(2 * np.pi)

    def wave(t: Any) -> Any:
        return .5 + .5 * np.sign(np.sin(tau * t))

    parts: dict[str, Callable[[], Any]] = {
        "rows": lambda: wave(y),
        "columns": lambda: wave(x),
        "diagonals": lambda: wave((x + y) * .7),
        "checks": lambda: abs(wave(x) - wave(y)),
        "dots": lambda: (np.hypot(x % 1 - .5, y % 1 - .5) < .32),
        "waves": lambda: wave(y + .35 * np.sin(tau * x * .5)),
        "rings": lambda: wave(np.hypot(x, y)),
        "rays": lambda: wave(np.arctan2(y, x) * 8 / tau),
        "grid": lambda: np.maximum(x % 1 < .22, y % 1 < .22),
        "bricks": lambda: np.maximum(y % 1 < .2, (x + .5 * (np.floor(y) % 2)) % 1 < .15),
    }
    return np.asarray(parts[TEXTURES[kind]](), dtype=np.float32)


def garment(kind: int, x: Pixels, y: Pixels) -> NDArray[np.bool_]:
    """Return a garment's outline."""
    def box(cx: float, cy: float, w: float, h: float) -> Any:
        return (abs(x - cx) < w) & (abs(y - cy) < h)

    parts: dict[str, Callable[[], Any]] = {
        "shirt": lambda: box(0, .1, .45, .75) | box(0, -.4, .95, .25),
        "trousers": lambda: box(0, -.7, .45, .2) | box(-.27, .2, .18, .75) | box(.27, .2, .18, .75),
        "dress": lambda: (abs(x) < .25 + .3 * np.maximum(y + .2, 0)) & (abs(y) < .95),
        "bag": lambda: box(0, .25, .7, .45) | (box(0, -.35, .4, .3) & ~box(0, -.3, .28, .22)),
        "boot": lambda: box(-.2, -.2, .3, .75) | box(.15, .65, .7, .2),
    }
    return np.asarray(parts[GARMENTS[kind]]())


def by_kind(draw: Callable[[int, Pixels, Pixels], Any], kinds: NDArray[np.int64], x: Pixels,
             y: Pixels) -> Pixels:
    """Draw every sample's own kind, all samples of a kind at once."""
    out = np.zeros((len(kinds), SIDE, SIDE), dtype=np.float32)
    for kind in np.unique(kinds):
        chosen = kinds == kind
        out[chosen] = draw(int(kind), x[chosen], y[chosen])
    return out


def paint(mask: Pixels, color: Pixels, background: Pixels) -> Pixels:
    """Draw a coloured figure over a background, ``(N, 3, side, side)``."""
    painted: Pixels = background * (1 - mask[:, None]) + color[:, :, None, None] * mask[:, None]
    return painted


def backdrop(rng: Rng, count: int) -> Pixels:
    """Soft, dark gradients."""
    base = rng.uniform(.05, .4, (count, 3, 1, 1)).astype(np.float32)
    slope = rng.uniform(-.15, .15, (2, count, 3, 1, 1)).astype(np.float32)
    return np.asarray(base + slope[0] * X[None] + slope[1] * Y[None], dtype=np.float32)


def tint(rng: Rng, which: NDArray[np.int64]) -> Pixels:
    """Return the named colours, a little off."""
    table: Pixels = np.array(list(COLORS.values()), dtype=np.float32)
    noise: Pixels = rng.normal(0, .05, (len(which), 3)).astype(np.float32)
    return np.asarray(table[which] + noise, dtype=np.float32)


def finish(rng: Rng, image: Pixels, noise: float) -> NDArray[np.uint8]:
    """Add noise and turn values into bytes."""
    image = image + rng.normal(0, noise, image.shape).astype(np.float32)
    return (image.clip(0, 1) * 255).astype(np.uint8)
