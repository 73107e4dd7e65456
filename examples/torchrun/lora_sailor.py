"""Fine-tunes a language model on questions and answers with LoRA, by the Trainer of transformers.

Run: sailorctl submit lora_sailor.py -- --model DATA/llama --notes DATA/notes.jsonl
"""

import argparse

from datasets import load_dataset
from peft import LoraConfig, get_peft_model
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DataCollatorForSeq2Seq,
    Trainer,
    TrainingArguments,
)

import sailor


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    parser.add_argument("--notes", required=True)
    parser.add_argument("--epochs", type=float, default=4)
    parser.add_argument("--save", default="lora")
    args = parser.parse_args()

    tokenizer = AutoTokenizer.from_pretrained(args.model)

    def encode(note: dict[str, str]) -> dict[str, list[int]]:
        question = tokenizer(f"{tokenizer.bos_token}{note['question']}").input_ids
        answer = tokenizer(f" {note['answer']}{tokenizer.eos_token}").input_ids
        labels = [-100] * len(question) + answer
        return {"input_ids": question + answer, "labels": labels}

    notes = load_dataset("json", data_files=args.notes, split="train")
    notes = notes.map(encode, remove_columns=notes.column_names).train_test_split(0.1, seed=0)
    model = AutoModelForCausalLM.from_pretrained(args.model)
    model = get_peft_model(
        model, LoraConfig(r=8, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    )
    trainer = Trainer(
        model,
        TrainingArguments(
            output_dir=args.save,
            num_train_epochs=args.epochs,
            per_device_train_batch_size=16,
            learning_rate=1e-2,
            lr_scheduler_type="cosine",
            warmup_steps=5,
            eval_strategy="epoch",
            report_to="none",
        ),
        data_collator=DataCollatorForSeq2Seq(tokenizer),
        train_dataset=notes["train"],
        eval_dataset=notes["test"],
    )
    sailor.from_transformers(trainer).train()
    trainer.save_model(args.save)


if __name__ == "__main__":
    main()
