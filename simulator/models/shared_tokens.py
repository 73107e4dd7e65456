"""A model's costs under sequence parallelism: ranks share the tokens between split parts.

Each rank then has 1/TP of what it had in full, but for the inputs of split parts, which it gathers.
The elements that move are the same as of all-reduces. Counts hold for TP degrees above 1.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from simulator.models.layers import Layer, LayerKind, Model, PassPoint, Term

_ANY = 2**20
"""Number of pieces of what any number of ranks can divide."""
_GATHERED: dict[LayerKind, frozenset[str]] = {
    # Every rank looks up all tokens, and gathers the gradient of what it found.
    "embedding": frozenset({"token ids", "lookup gradient of the output"}),
    "block": frozenset({"attention input", "mlp input", "freed: mlp input", "later: mlp input"}),
    "head": frozenset({"projection input", "projection gradient of the input", "targets"}),
}
_OWN_TRAFFIC = {
    # Of the tokens' traffic, in hidden widths: norms and residuals; positions; the norm.
    "norms, residuals, products": 10,
    "rows": 3,
    "norm and projection": 2,
}


def with_shared_tokens(model: Model) -> Model:
    """Return a built-in language model with the costs of ranks that share its tokens."""
    known: dict[int, Layer] = {}
    layers = []
    for layer in model.layers:
        # Equal blocks go on sharing their terms.
        if id(layer.kept) not in known:
            known[id(layer.kept)] = _layer(layer, model)
        like = known[id(layer.kept)]
        layers.append(replace(like, name=layer.name, tensors=layer.tensors))
    return replace(model, layers=tuple(layers))


def _layer(layer: Layer, model: Model) -> Layer:
    gathered = _GATHERED[layer.kind]
    kept = tuple(_divide_own(layer.kept, gathered))
    moments = tuple(
        replace(moment, terms=tuple(_divide_own(moment.terms, gathered, moment.name)))
        for moment in layer.moments
    )
    if layer.kind == "block":
        assert model.architecture is not None, "only built-in models share tokens"
        if not model.architecture.norm_first:
            # The gathered input of attention is another tensor than that of the layer.
            kept = (*kept, Term("input", per_token=model.hidden, ways=_ANY))
        moments = tuple(_add_gathered_gradient(moments, model.hidden))
    return replace(
        layer,
        kept=kept,
        checkpoint=tuple(_divide_own(layer.checkpoint, gathered)),
        moments=moments,
        traffic=tuple(_traffic(layer.traffic, model.hidden)),
    )


def _divide_own(
    terms: Iterable[Term], gathered: frozenset[str], moment: str = ""
) -> Iterator[Term]:
    """Divide among the ranks what they hold of each token, except what they gather."""
    for term in terms:
        names = {term.name, f"{moment} {term.name}"}
        is_own = term.ways == 1 and term.per_token != 0 and not names & gathered
        yield replace(term, ways=_ANY) if is_own else term


def _add_gathered_gradient(moments: Iterable[PassPoint], hidden: int) -> Iterator[PassPoint]:
    """Add the gradient of all tokens behind the last product, which each rank gathers.

    It arrives by rank and is copied into the order of samples, so that two copies exist meanwhile.
    """
    for moment in moments:
        gathered = Term("gathered gradient", per_token=hidden)
        match moment.name:
            case "mlp down projection":
                yield replace(moment, terms=(*moment.terms, gathered))
            case "mlp activation":
                others = tuple(term for term in moment.terms if term.name != "gradients")
                yield PassPoint("gather", (*others, replace(gathered, per_token=2 * hidden)))
                yield moment
            case _:
                yield moment


def _traffic(terms: Iterable[Term], hidden: int) -> Iterator[Term]:
    for term in terms:
        own = min(_OWN_TRAFFIC.get(term.name, 0) * hidden, term.per_token)
        if term.name == "drawing of residuals":
            own = term.per_token
        if own:
            yield replace(term, per_token=own, ways=_ANY)
        if own < term.per_token or not own:
            yield replace(term, per_token=term.per_token - own)
