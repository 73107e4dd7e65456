"""Trains a vision transformer on images in an .npz file, with DistributedDataParallel.

Run: torchrun --nproc-per-node 2 vit.py --images DATA/shapes.npz
"""

import argparse
import os

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler
from transformers import ViTConfig, ViTForImageClassification


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

    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    device = torch.device(int(os.environ["LOCAL_RANK"])) if torch.cuda.is_available() else "cpu"
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
    model = DistributedDataParallel(model.to(device))
    train = Images(args.images, slice(0, 240), augment=True)
    test = Images(args.images, slice(240, 300), augment=False)
    sampler = DistributedSampler(train)
    train_loader = DataLoader(train, args.batch_size // size, sampler=sampler)
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

    for epoch in range(args.epochs):
        model.train()
        sampler.set_epoch(epoch)
        for batch in train_loader:
            batch = [part.to(device) for part in batch]
            loss = smoothed(model(batch[0]), batch)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            scheduler.step()
        model.eval()
        right = torch.zeros(2)
        with torch.no_grad():
            for batch in test_loader:
                batch = [part.to(device) for part in batch]
                right += torch.tensor(accuracy(model(batch[0]), batch))
        if rank == 0:
            print(f"epoch {epoch} loss {loss.item():.4f} accuracy {right[0] / right[1]:.3f}")

    if rank == 0 and args.save:
        model.module.save_pretrained(args.save)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
