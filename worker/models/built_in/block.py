"""A transformer block: attention and MLP, each with a norm before or after and a residual."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor, nn
from torch.nn import functional

from simulator.models.architecture import Architecture
from simulator.spec.job import Job
from worker.layout.split_spec import SplitKind
from worker.models.built_in.attention import Attention, norm, tensor_rows


class MLP(nn.Module):
    """Two linear layers around a nonlinearity, or three if it is gated; without the residual."""

    def __init__(self, job: Job, architecture: Architecture, index: int) -> None:
        super().__init__()
        h, ffn = job.model.hidden, job.model.ffn
        bias = tensor_rows(job.model, index, "mlp.up.bias") > 0
        self.nonlinearity = architecture.nonlinearity
        self.norm = norm(h, architecture)
        self.entry = nn.Identity()
        if self.nonlinearity == "swiglu":
            self.gate = nn.Linear(h, ffn, bias=bias)
        self.up = nn.Linear(h, ffn, bias=bias)
        self.down = nn.Linear(ffn, h, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        x = self.entry(x)
        up: Tensor = self.up(x)
        match self.nonlinearity:
            case "swiglu":
                up = functional.silu(self.gate(x)) * up
            case "relu":
                up = functional.relu(up)
            case "gelu":
                up = functional.gelu(up)
            case "gelu_tanh":
                up = functional.gelu(up, approximate="tanh")
        out: Tensor = self.down(up)
        return out


class Block(nn.Module):
    """One layer of a transformer between the embedding and the head."""

    splits: ClassVar[dict[str, SplitKind]] = {
        "attention.entry": "entry",
        "attention.query": "columns",
        "attention.key": "columns",
        "attention.value": "columns",
        "attention.dropout": "heads",
        "attention.output": "rows",
        "mlp.entry": "entry",
        "mlp.gate": "columns",
        "mlp.up": "columns",
        "mlp.down": "rows",
    }

    def __init__(self, job: Job, architecture: Architecture, index: int) -> None:
        super().__init__()
        self.norm_first = architecture.norm_first
        self.attention = Attention(job, architecture, index)
        self.mlp = MLP(job, architecture, index)
        self.attention_dropout = nn.Dropout(job.dropout)
        self.mlp_dropout = nn.Dropout(job.dropout)

    def forward(self, x: Tensor) -> Tensor:
        attention, mlp = self.attention, self.mlp
        if self.norm_first:
            x = x + self.attention_dropout(attention(attention.norm(x)))
            return x.add(self.mlp_dropout(mlp(mlp.norm(x))))
        x = attention.norm(x + self.attention_dropout(attention(x)))
        out: Tensor = mlp.norm(x + self.mlp_dropout(mlp(x)))
        return out
