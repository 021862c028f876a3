"""Build the WordPiece tokenizer that ships with tapfl: python scripts/build_tokenizer.py

Every printable ASCII character is a piece, so that no text is unknown.
"""

import string
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
OUT = Path(__file__).parent.parent / "src" / "tapfl" / "assets" / "tokenizer.json"


def build(words: list[str]) -> Tokenizer:
    characters = sorted(set(string.printable.lower()) - set(string.whitespace))
    pieces = [*SPECIAL, *characters, *(f"##{c}" for c in characters), *words]
    tokenizer = Tokenizer(models.WordPiece(
        {piece: i for i, piece in enumerate(dict.fromkeys(pieces))}, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)])
    return tokenizer


if __name__ == "__main__":
    build([]).save(str(OUT))
