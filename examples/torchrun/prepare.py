"""Writes small data and a small model for the scripts beside: `python prepare.py FOLDER`.

FOLDER gets tokens.npy (the bytes of a text), notes.jsonl (questions and answers), shapes.npz
(images of three classes), and llama/ (a LLaMA of 0.2 million random weights with its tokenizer).
"""

import json
import sys
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

TEXT = Path(__file__).parent.parent.parent.joinpath("LICENSE").read_text(encoding="utf-8")
NUMBERS = np.random.default_rng(0)


def notes() -> list[dict[str, str]]:
    """Return small sums as questions and answers."""
    pairs = NUMBERS.integers(1, 50, (240, 2)).tolist()
    return [{"question": f"What is {a} plus {b}?", "answer": f"{a + b}"} for a, b in pairs]


def shapes() -> dict[str, np.ndarray]:
    """Return noisy images of a bar, a cross and a frame."""
    labels = NUMBERS.integers(0, 3, 300)
    images = NUMBERS.normal(0.0, 0.3, (300, 1, 16, 16)).astype(np.float32)
    for image, label in zip(images[:, 0], labels, strict=True):
        row, column = NUMBERS.integers(2, 8, 2)
        if label == 0:
            image[row, 2:14] += 1
        elif label == 1:
            image[row + 2, 2:14] += 1
            image[2:14, column + 2] += 1
        else:
            image[row : row + 7, column : column + 7] += 1
            image[row + 1 : row + 6, column + 1 : column + 6] -= 1
    return {"images": images, "labels": labels}


def tokenizer() -> PreTrainedTokenizerFast:
    """Return a byte-level BPE of 512 tokens."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel()
    made.train_from_iterator(
        [TEXT, *(f"{note['question']} {note['answer']}" for note in notes())],
        trainers.BpeTrainer(vocab_size=512, special_tokens=["<s>", "</s>", "<pad>"]),
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=made, bos_token="<s>", eos_token="</s>", pad_token="<pad>"
    )


def main(folder: Path) -> None:
    """Write everything."""
    folder.mkdir(parents=True, exist_ok=True)
    np.save(folder / "tokens.npy", np.frombuffer(TEXT.encode(), dtype=np.uint8).astype(np.uint16))
    lines = "".join(json.dumps(note) + "\n" for note in notes())
    folder.joinpath("notes.jsonl").write_text(lines, encoding="utf-8")
    np.savez(folder / "shapes.npz", **shapes())
    words = tokenizer()
    words.save_pretrained(folder / "llama")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(words),
        hidden_size=64,
        intermediate_size=160,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        pad_token_id=words.pad_token_id,
    )
    LlamaForCausalLM(config).save_pretrained(folder / "llama")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
