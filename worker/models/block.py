"""A transformer block: attention and MLP, each with a norm before or after and a residual."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor, nn
from torch.nn import functional

from simulator.models.architecture import Nonlinearity
from worker.layout.split_spec import SplitKind
from worker.models.attention import Attention, AttentionShape, norm


class MLP(nn.Module):
    """Two linear layers around a nonlinearity, or three if it is gated; without the residual."""

    def __init__(
        self, shape: AttentionShape, *, ffn: int, nonlinearity: Nonlinearity, bias: bool
    ) -> None:
        super().__init__()
        self.nonlinearity = nonlinearity
        self.norm = norm(shape.hidden, rms=shape.rms_norm, epsilon=shape.norm_epsilon)
        self.entry = nn.Identity()
        if nonlinearity == "swiglu":
            self.gate = nn.Linear(shape.hidden, ffn, bias=bias)
        self.up = nn.Linear(shape.hidden, ffn, bias=bias)
        self.down = nn.Linear(ffn, shape.hidden, bias=bias)

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

    def __init__(
        self,
        shape: AttentionShape,
        *,
        ffn: int,
        nonlinearity: Nonlinearity,
        mlp_bias: bool,
        norm_first: bool,
        dropout: float,
    ) -> None:
        super().__init__()
        self.norm_first = norm_first
        self.attention = Attention(shape, dropout=dropout)
        self.mlp = MLP(shape, ffn=ffn, nonlinearity=nonlinearity, bias=mlp_bias)
        self.attention_dropout = nn.Dropout(dropout)
        self.mlp_dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        attention, mlp = self.attention, self.mlp
        if self.norm_first:
            x = x + self.attention_dropout(attention(attention.norm(x)))
            return x.add(self.mlp_dropout(mlp(mlp.norm(x))))
        x = attention.norm(x + self.attention_dropout(attention(x)))
        out: Tensor = mlp.norm(x + self.mlp_dropout(mlp(x)))
        return out
