"""The training runtime. It is the only package that may import torch."""
