"""How samples become text: the paper's template table, word for word."""

from __future__ import annotations

from collections.abc import Sequence


def mmlu(subject: str, question: str, choices: Sequence[str], answer: int) -> tuple[str, str]:
    """Return the prompt of a multiple-choice question and the expected response."""
    options = [f"{letter}. {choice}" for letter, choice in zip("ABCDEFGH", choices, strict=False)]
    prompt = (f"The following is a multiple-choice question about {subject}.\n"
              "Choose the correct answer from the options below.\n"
              f"Question: {question}\nOptions:\n" + "\n".join(options))
    return prompt, f"Correct answer on {subject}: {options[answer]}"


def vqa(question: str, answer: str) -> tuple[str, str]:
    """Return the prompt of a question about an image and the expected response."""
    return (f"Answer the question based on the image.\nQuestion: {question}", f"Answer: {answer}")


def commongen(concepts: Sequence[str], answer: str) -> tuple[str, str]:
    """Return the prompt of a set of concepts and the expected description."""
    return ("Generate an appropriate description from the concepts below.\n"
            f"Concepts: {', '.join(concepts)}", f"Description: {answer}")
