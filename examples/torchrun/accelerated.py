"""Fine-tunes all weights of a language model on questions and answers, with Accelerate.

Run: accelerate launch accelerated.py --model DATA/llama --notes DATA/notes.jsonl
"""

import argparse
import json
from pathlib import Path

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, AutoTokenizer, get_linear_schedule_with_warmup


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

    accelerator = Accelerator(gradient_accumulation_steps=2)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(args.model)
    data = Notes(args.notes, AutoTokenizer.from_pretrained(args.model))
    train, test = torch.utils.data.random_split(data, [0.9, 0.1])
    train_loader = DataLoader(train, 8, shuffle=True, collate_fn=pad)
    test_loader = DataLoader(test, 8, collate_fn=pad)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = get_linear_schedule_with_warmup(optimizer, 5, args.epochs * len(train_loader) // 2)
    model, optimizer, train_loader, test_loader, scheduler = accelerator.prepare(
        model, optimizer, train_loader, test_loader, scheduler
    )
    for epoch in range(args.epochs):
        model.train()
        for batch in train_loader:
            with accelerator.accumulate(model):
                loss = model(**batch).loss
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
        model.eval()
        with torch.no_grad():
            losses = [accelerator.gather(model(**batch).loss) for batch in test_loader]
        accelerator.print(f"epoch {epoch} loss {torch.stack(losses).mean().item():.4f}")
    if args.save:
        accelerator.unwrap_model(model).save_pretrained(args.save)


if __name__ == "__main__":
    main()
