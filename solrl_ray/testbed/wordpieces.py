"""The testbed's tokenizers, made from the world's own words: CLIP byte-pair encoding and T5 unigram.

Every word of the grammar is one token in both; other text is encoded letter by letter.
"""

from __future__ import annotations

from tokenizers.pre_tokenizers import ByteLevel
from transformers import CLIPTokenizerFast, T5TokenizerFast

from solrl_ray.testbed.world import FIELD_VALUES

CLIP_TOKENS = 16
"""Start, up to 12 words, end, padding."""
T5_TOKENS = 16
"""Up to 12 words, end, padding."""


def words() -> list[str]:
    """Every word of the grammar, once, sorted."""
    phrases = [phrase for values in FIELD_VALUES for phrase in values]
    return sorted({word for phrase in [*phrases, "a", "on"] for word in phrase.split()})


def clip_tokenizer() -> CLIPTokenizerFast:
    """Byte-level BPE whose merges spell out exactly the grammar's words."""
    letters = sorted(ByteLevel.alphabet())
    vocabulary = [*letters, *(f"{letter}</w>" for letter in letters)]
    merges: list[tuple[str, str]] = []
    for word in words():
        pieces = [*word[:-1], f"{word[-1]}</w>"]
        while len(pieces) > 1:
            # Merging from the end keeps the merges of different words apart: each joins a whole suffix.
            pair = (pieces[-2], pieces[-1])
            if pair not in merges:
                merges.append(pair)
                vocabulary.append("".join(pair))
            pieces[-2:] = ["".join(pair)]
    vocabulary += ["<|startoftext|>", "<|endoftext|>"]
    return CLIPTokenizerFast(
        vocab={token: index for index, token in enumerate(vocabulary)}, merges=merges, model_max_length=CLIP_TOKENS
    )


def t5_tokenizer() -> T5TokenizerFast:
    """Unigram model with the grammar's words, and single letters for anything else."""
    special = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("▁", -8.0)]
    letters = [(letter, -12.0) for letter in "abcdefghijklmnopqrstuvwxyz0123456789,.-'"]
    return T5TokenizerFast(
        vocab=[*special, *((f"▁{word}", -2.0) for word in words()), *letters], extra_ids=0, model_max_length=T5_TOKENS
    )
