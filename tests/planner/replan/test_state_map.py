"""The state of a job: each parameter once."""

from __future__ import annotations

import pytest

from planner.replan.state_map import state_of
from simulator.hardware.catalogue import load_catalogue
from simulator.layer_costs.layer_costs import LayerCosts
from simulator.models.presets import preset
from simulator.network.network import Network
from simulator.spec.job import Job

PARAMETERS = {"gpt2": 124_439_808, "opt-125m": 125_239_296, "opt-30b": None}


@pytest.mark.parametrize("name", PARAMETERS)
def test_a_table_that_embedding_and_head_share_is_counted_once(name: str) -> None:
    catalogue = load_catalogue()
    job = Job(name, preset(name), 8, 512)
    costs = LayerCosts(job, profile=None, catalogue=catalogue, network=Network(catalogue))
    state = state_of(costs)
    parameters = state.bytes_by_unit.sum() / 12  # Weights and two moments in fp32.
    assert parameters == costs.parameters(1).sum() - costs.tied_parameters(1)
    if PARAMETERS[name] is not None:
        assert parameters == PARAMETERS[name]
    layers = len(costs.parameters(1))
    for span in ((0, 2), (layers - 1, layers)):
        held = state.bytes_by_unit[state.needs(span)].sum() / 12
        assert held == costs.parameters(1)[slice(*span)].sum()
