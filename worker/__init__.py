"""The training runtime on one device, and the only package that may import torch."""
