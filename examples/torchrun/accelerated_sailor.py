"""Fine-tunes all weights of a language model on questions and answers, with Accelerate.

Run: sailorctl submit accelerated_sailor.py -- --model DATA/llama --notes DATA/notes.jsonl
"""

import argparse
import json
from pathlib import Path

import torch
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, AutoTokenizer, get_linear_schedule_with_warmup

import sailor


class Notes:
    def __init__(self, path: str, tokenizer) -> None:
        self.tokenizer = tokenizer
        self.notes = [json.loads(line) for line in Path(path).read_text().splitlines()]

    def __len__(self) -> int:
        return len(self.notes)

    def __getitem__(self, index: int) -> dict[str, list[int]]:
        note = self.notes[index]
        question = self.tokenizer(f"{self.tokenizer.bos_token}{note['question']}").input_ids
        answer = self.tokenizer(f" {note['answer']}{self.tokenizer.eos_token}").input_ids
        return {"input_ids": question + answer, "labels": [-100] * len(question) + answer}


def pad(samples: list[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
    longest = max(len(sample["input_ids"]) for sample in samples)

    def rows(key: str, filler: int) -> torch.Tensor:
        return torch.tensor([s[key] + [filler] * (longest - len(s[key])) for s in samples])

    mask = [[1] * len(s["input_ids"]) + [0] * (longest - len(s["input_ids"])) for s in samples]
    return {
        "input_ids": rows("input_ids", 0),
        "attention_mask": torch.tensor(mask),
        "labels": rows("labels", -100),
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    parser.add_argument("--notes", required=True)
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--save")
    args = parser.parse_args()

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(args.model)
    data = Notes(args.notes, AutoTokenizer.from_pretrained(args.model))
    train, test = torch.utils.data.random_split(data, [0.9, 0.1])
    train_loader = DataLoader(train, 8, shuffle=True, collate_fn=pad)
    test_loader = DataLoader(test, 8, collate_fn=pad)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = get_linear_schedule_with_warmup(optimizer, 5, args.epochs * len(train_loader) // 2)
    options = {"optimizer": optimizer, "scheduler": scheduler, "clip_norm": 1.0}
    evaluation = {"eval_dataset": test_loader, "eval_every": len(train_loader) // 2}
    sailor.Trainer(
        model, train_loader, batch_size=16, epochs=args.epochs, **options, **evaluation
    ).train()
    if args.save:
        model.save_pretrained(args.save)


if __name__ == "__main__":
    main()
