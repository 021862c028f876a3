"""Make the small files of this example again: python examples/clinics/make.py

Three clinics. Radiology sorts pictures into three diagnoses, the record office turns reports into
codes, and the ward answers questions about pictures. Everything is drawn and written from a seed.
"""

import csv
import json
import random
from pathlib import Path

from PIL import Image, ImageDraw, ImageFilter

HERE = Path(__file__).parent
FINDINGS = ("clear", "nodule", "fracture")
CODES = {
    "J18": ["cough and fever for {n} days, crackles over the {side} lung",
            "{side} lung base dull, productive cough, pneumonia suspected",
            "shortness of breath, fever, infiltrate in the {side} lung"],
    "S52": ["fell on the {side} hand {n} days ago, forearm swollen and painful",
            "{side} wrist deformed after a fall, cannot turn the forearm",
            "cyclist, hit the {side} arm, sharp pain over the radius"],
    "Z00": ["check up, no complaints, last visit {n} months ago",
            "routine examination, sleeps and eats well, walks {n} km a day",
            "wants a certificate for sports, feels healthy, no findings"],
}
URGENT = {
    "urgent": ["short of breath since this morning, cannot speak in sentences",
               "strong pain over the {side} chest for {n} minutes",
               "fell from {n} meters, {side} leg bent, cold foot"],
    "routine": ["needs a new prescription, {n} tablets are left",
                "asks for the results of the test {n} days ago",
                "{side} shoulder aches a little after sports, no fever"],
}
LAYOUT = """\
# Three clinics, each with one task and its own files, next to this one.
tasks:
  xray:
    kind: image_classification
    modalities: [image]
    classes: [clear, nodule, fracture]
  coding:
    kind: text_classification
    modalities: [text]
    classes: [J18, S52, Z00]
  ask:
    kind: text_generation
    modalities: [image, text]
clients:
  - name: radiology
    tasks:
      xray: {path: radiology}                     # one folder per class
  - name: records
    tasks:
      coding: {path: records/reports.csv, text: report, label: code}
  - name: ward
    tasks:
      ask:
        path: ward/questions.jsonl
        image: picture                            # paths relative to the file
        text: "Question: {question}"
        answer: "Answer: {answer}"
"""
# Two that come later: one with a task that is known, one with a task of its own.
TRIAGE = """\
  triage:
    kind: text_classification
    modalities: [text]
    classes: [urgent, routine]
"""
LATER = """\
  - name: village
    tasks:
      coding: {path: village/reports.csv, text: report, label: code}
  - name: hotline
    tasks:
      triage: {path: hotline/calls.csv, text: call, label: class}
"""


def xray(rng, finding):
    """A dark chest with two lungs; a nodule is a bright disc, a fracture a bright line."""
    image = Image.new("L", (64, 64), rng.randint(20, 50))
    draw = ImageDraw.Draw(image)
    shade = rng.randint(90, 130)
    for left in (8 + rng.randint(-2, 2), 36 + rng.randint(-2, 2)):
        draw.ellipse((left, 10, left + 20, 54), fill=shade)
    side = rng.choice(("left", "right"))
    x, y = (18 if side == "left" else 46) + rng.randint(-4, 4), rng.randint(20, 44)
    if finding == "nodule":
        size = rng.randint(4, 6)
        draw.ellipse((x - size, y - size, x + size, y + size), fill=245)
    elif finding == "fracture":
        draw.line((x - 9, y - rng.randint(2, 8), x + 9, y + rng.randint(2, 8)), fill=245, width=3)
    return image.filter(ImageFilter.GaussianBlur(0.6)), side


def texts(rng, path, columns, classes, count):
    """A table of texts and their classes."""
    path.parent.mkdir(exist_ok=True)
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(columns)
        for _ in range(count):
            name = rng.choice(list(classes))
            text = rng.choice(classes[name]).format(n=rng.randint(2, 12),
                                                    side=rng.choice(("left", "right")))
            writer.writerow([text, name])


def main():
    rng = random.Random(7)
    for finding in FINDINGS:
        folder = HERE / "radiology" / finding
        folder.mkdir(parents=True, exist_ok=True)
        for number in range(40):
            xray(rng, finding)[0].save(folder / f"{number:02d}.png")
    texts(rng, HERE / "records" / "reports.csv", ("report", "code"), CODES, 180)
    (HERE / "ward" / "pictures").mkdir(parents=True, exist_ok=True)
    with (HERE / "ward" / "questions.jsonl").open("w", encoding="utf-8") as file:
        for number in range(60):
            finding = FINDINGS[number % 3]
            image, side = xray(rng, finding)
            picture = f"pictures/{number:02d}.png"
            image.save(HERE / "ward" / picture)
            sides = side if finding != "clear" else "none"
            for question, answer in (("what do you see?", finding), ("on which side?", sides),
                                     ("is it clear?", "yes" if finding == "clear" else "no")):
                row = {"picture": picture, "question": question, "answer": answer}
                file.write(json.dumps(row) + "\n")
    (HERE / "federation.yaml").write_text(LAYOUT, encoding="utf-8")
    later(random.Random(8))


def later(rng):
    """The files of those who come later, alone and together with everybody else."""
    texts(rng, HERE / "village" / "reports.csv", ("report", "code"), CODES, 40)
    texts(rng, HERE / "hotline" / "calls.csv", ("call", "class"), URGENT, 40)
    tasks, clients = LAYOUT.partition("clients:\n")[::2]
    coding = tasks[tasks.index("  coding:"):tasks.index("  ask:")]
    (HERE / "newcomers.yaml").write_text(
        "# Two that come later: a known task, and one of its own; docs/newcomers.md.\n"
        f"tasks:\n{coding}{TRIAGE}clients:\n{LATER}", encoding="utf-8")
    (HERE / "together.yaml").write_text(
        tasks.replace("Three clinics", "Five clinics") + TRIAGE + "clients:\n" + clients + LATER,
        encoding="utf-8")


if __name__ == "__main__":
    main()
