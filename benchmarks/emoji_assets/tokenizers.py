"""Tokenizers of the real classes, whose tokens are the words of given texts."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from typing import Any

from emoji_assets.drawings import words
from tokenizers import Tokenizer
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.trainers import BpeTrainer
from transformers import CLIPTokenizerFast, T5TokenizerFast

START, END = "<|startoftext|>", "<|endoftext|>"


def clip_tokenizer(texts: Sequence[str], tokens: int, length: int) -> Any:
    """CLIP's byte-level BPE with at most `tokens` tokens; frequent words are one token."""
    suffix = "</w>"
    learned = Tokenizer(BPE(end_of_word_suffix=suffix))
    learned.pre_tokenizer = ByteLevel(add_prefix_space=False)
    alphabet = sorted(ByteLevel.alphabet())
    available = tokens - len(alphabet) - 2
    trainer = BpeTrainer(
        vocab_size=available,
        initial_alphabet=alphabet,
        end_of_word_suffix=suffix,
        show_progress=False,
        special_tokens=[],
    )
    # Train on single words, as spaces would become parts of tokens.
    learned.train_from_iterator((word for text in texts for word in words(text)), trainer)
    merges = [tuple(pair) for pair in json.loads(learned.to_str())["model"]["merges"]]
    pieces = [*alphabet, *(f"{letter}{suffix}" for letter in alphabet), *("".join(pair) for pair in merges), START, END]
    vocabulary = {piece: number for number, piece in enumerate(dict.fromkeys(pieces))}
    return CLIPTokenizerFast(vocab=vocabulary, merges=merges, model_max_length=length)


def t5_tokenizer(texts: Sequence[str], tokens: int, length: int) -> Any:
    """T5's unigram model: tokens for the most frequent words, and letters for the rest."""
    counts = Counter(word for text in texts for word in words(text))
    letters = sorted({letter for text in texts for letter in text if letter != " "} | set("abcdefghijklmnopqrstuvwxyz"))
    special = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0)]
    spelled = [("▁", -10.0), *((letter, -10.0) for letter in letters)]
    available = tokens - len(special) - len(spelled)
    known = [(f"▁{word}", -1.0) for word, _ in sorted(counts.items(), key=lambda pair: (-pair[1], pair[0]))[:available]]
    return T5TokenizerFast(vocab=[*special, *spelled, *known], extra_ids=0, model_max_length=length)
