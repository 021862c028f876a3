"""Build the WordPiece tokenizer that ships with tapfl: python scripts/build_tokenizer.py

Every word of the miniature world is a piece, and so is every printable ASCII character: no text is
unknown.
"""

import string
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from tapfl.data.miniature import words

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
    build(words()).save(str(OUT))
