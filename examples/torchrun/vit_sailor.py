"""Trains a vision transformer on images in an .npz file, with DistributedDataParallel.

Run: sailorctl submit vit_sailor.py -- --images DATA/shapes.npz
"""

import argparse

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset
from transformers import ViTConfig, ViTForImageClassification

import sailor


class Images(Dataset):
    def __init__(self, path: str, part: slice, augment: bool) -> None:
        with np.load(path) as file:
            self.images = torch.from_numpy(file["images"][part])
            self.labels = torch.from_numpy(file["labels"][part])
        self.augment = augment

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        image = self.images[index]
        if self.augment:
            left, top = torch.randint(0, 5, (2,)).tolist()
            image = F.pad(image, (2, 2, 2, 2))[:, top : top + 16, left : left + 16]
            if torch.rand(()) < 0.5:
                image = image.flip(-1)
        return image, self.labels[index]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--images", required=True)
    parser.add_argument("--batch-size", type=int, default=20)
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--save")
    args = parser.parse_args()

    torch.manual_seed(0)
    config = ViTConfig(
        image_size=16,
        patch_size=4,
        num_channels=1,
        hidden_size=48,
        intermediate_size=96,
        num_hidden_layers=4,
        num_attention_heads=4,
        hidden_dropout_prob=0.1,
        num_labels=3,
    )
    model = ViTForImageClassification(config)
    train = Images(args.images, slice(0, 240), augment=True)
    test = Images(args.images, slice(240, 300), augment=False)
    train_loader = DataLoader(train, args.batch_size, shuffle=True)
    test_loader = DataLoader(test, args.batch_size)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-4, weight_decay=0.05)
    steps = args.epochs * len(train_loader)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, max_lr=5e-4, total_steps=steps, cycle_momentum=False
    )

    def smoothed(output, batch: tuple[Tensor, Tensor]) -> Tensor:
        return F.cross_entropy(output.logits, batch[1], label_smoothing=0.1)

    def accuracy(output, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, int]:
        return (output.logits.argmax(-1) == batch[1]).sum(), len(batch[1])

    options = {"loss": smoothed, "optimizer": optimizer, "scheduler": scheduler}
    evaluation = {"eval_dataset": test_loader, "eval_every": len(train_loader)}
    evaluation["metrics"] = {"accuracy": accuracy}
    sailor.Trainer(model, train_loader, epochs=args.epochs, **options, **evaluation).train()
    if args.save:
        model.save_pretrained(args.save)


if __name__ == "__main__":
    main()
