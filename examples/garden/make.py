"""Make the files of docs/tutorial.md: python examples/garden/make.py FOLDER

Two plots photograph leaves, a help desk sorts messages, a guide answers questions about pictures.
Everything is drawn and written from a seed, and stands for files of your own.
"""

import csv
import json
import random
import sys
from pathlib import Path

from PIL import Image, ImageDraw

STATES = ("healthy", "spots", "holes")
GREENS = {"north": (70, 140, 60), "south": (170, 160, 60)}  # the plots have different plants
OPENINGS = ("hello, ", "about my {n} roses: ", "my {n} tomatoes were fine, ", "")
MESSAGES = {
    "water": ["now the leaves hang down and the soil is dry", "the pots stand wet, the roots smell",
              "do they need a can every day?", "the edges turn brown since the heat came"],
    "pests": ["now there are small green insects under the leaves", "snails come every night",
              "white flies rise when I touch them", "something has eaten the roots"],
    "order": ["the parcel came with a broken pot", "two of them are missing on the bill",
              "I want to send the rest back", "when will the others arrive?"],
}
ENDINGS = (" can you help?", " what should I do now?", " thank you", "")


def leaf(rng, state, green):
    """A leaf on a pale ground with some dirt; spots are brown, holes show the ground."""
    ground = tuple(rng.randint(190, 235) for _ in range(3))
    image = Image.new("RGB", (96, 96), ground)
    draw = ImageDraw.Draw(image)
    shade = tuple(c + rng.randint(-25, 25) for c in green)
    draw.ellipse((18 + rng.randint(-10, 10), 6, 78 + rng.randint(-10, 10), 90), fill=shade)
    draw.line((48, 8, 48, 88), fill=tuple(c - 30 for c in shade), width=2)

    def dots(number, sizes, fill):
        for _ in range(number):
            x, y, size = rng.randint(34, 62), rng.randint(20, 76), rng.randint(*sizes)
            draw.ellipse((x - size, y - size, x + size, y + size), fill=fill)

    dots(rng.randint(2, 6), (1, 2), tuple(c + rng.choice((-40, 40)) for c in shade))
    if state != "healthy":
        dots(rng.randint(2, 4), (4, 6), (90, 45, 20) if state == "spots" else ground)
    return image


def write_leaves(rng, folder, green, number):
    """One folder per state, as many pictures in each."""
    for state in STATES:
        (folder / state).mkdir(parents=True, exist_ok=True)
        for i in range(number):
            leaf(rng, state, green).save(folder / state / f"{i:02d}.png")


def write_messages(rng, path, number):
    """A CSV file with the columns message and topic."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["message", "topic"])
        for _ in range(number):
            topic = rng.choice(list(MESSAGES))
            message = rng.choice(OPENINGS) + rng.choice(MESSAGES[topic]) + rng.choice(ENDINGS)
            writer.writerow([message.format(n=rng.randint(2, 12)), topic])


def write_questions(rng, folder, number):
    """Pictures, and JSON lines with two questions about each."""
    (folder / "pictures").mkdir(parents=True, exist_ok=True)
    with (folder / "questions.jsonl").open("w", encoding="utf-8") as file:
        for i in range(number):
            state, picture = STATES[i % 3], f"pictures/{i:02d}.png"
            leaf(rng, state, rng.choice(list(GREENS.values()))).save(folder / picture)
            for question, answer in (("what is wrong with it?", state),
                                     ("is it healthy?", "yes" if state == "healthy" else "no")):
                row = {"picture": picture, "question": question, "answer": answer}
                file.write(json.dumps(row) + "\n")


def main(folder):
    rng = random.Random(5)
    write_leaves(rng, folder / "north" / "leaves", GREENS["north"], 40)
    write_leaves(rng, folder / "south" / "leaves", GREENS["south"], 15)
    write_messages(rng, folder / "south" / "messages.csv", 40)
    write_messages(rng, folder / "desk" / "messages.csv", 200)
    write_questions(rng, folder / "guide", 90)
    leaf(rng, "holes", GREENS["south"]).save(folder / "new.png")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python make.py FOLDER")
    main(Path(sys.argv[1]))
