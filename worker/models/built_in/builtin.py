"""The layers of the built-in model families, built from the simulator's description."""

from __future__ import annotations

from torch import nn

from simulator.spec.job import Job
from worker.models.built_in.block import Block
from worker.models.built_in.embedding_and_head import LanguageHead, TokenEmbedding
from worker.models.built_in.exact import exact_layer
from worker.models.built_in.vision import ClassHead, PatchEmbedding


def builtin_layer(job: Job, index: int) -> nn.Module:
    """Build one full layer of the job's model."""
    model, architecture = job.model, job.model.architecture
    assert architecture is not None, f"{model.name} is of an unknown family"
    if model.family == "exact":
        return exact_layer(job, architecture, index)
    is_vision = architecture.image > 0
    match model.layers[index].kind:
        case "embedding":
            return (PatchEmbedding if is_vision else TokenEmbedding)(job, architecture)
        case "block":
            return Block(job, architecture, index)
        case "head":
            return (ClassHead if is_vision else LanguageHead)(model, architecture)
