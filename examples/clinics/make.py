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
LAYOUT = """\
# Three clinics, each with one task and its own files, beside this one.
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
      xray: {path: radiology}                     # one folder a class
  - name: records
    tasks:
      coding: {path: records/reports.csv, text: report, label: code}
  - name: ward
    tasks:
      ask:
        path: ward/questions.jsonl
        image: picture                            # paths beside the file
        text: "Question: {question}"
        answer: "Answer: {answer}"
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


def main():
    rng = random.Random(7)
    for finding in FINDINGS:
        folder = HERE / "radiology" / finding
        folder.mkdir(parents=True, exist_ok=True)
        for number in range(40):
            xray(rng, finding)[0].save(folder / f"{number:02d}.png")
    (HERE / "records").mkdir(exist_ok=True)
    with (HERE / "records" / "reports.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["report", "code"])
        for _ in range(180):
            code = rng.choice(list(CODES))
            text = rng.choice(CODES[code]).format(n=rng.randint(2, 12),
                                                  side=rng.choice(("left", "right")))
            writer.writerow([text, code])
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


if __name__ == "__main__":
    main()
