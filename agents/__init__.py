"""One agent per node: it watches the machine, its neighbours and its workers."""
