"""The training engines: sailor's own and DeepSpeed, behind one interface."""
