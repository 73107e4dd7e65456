"""Our training engine and DeepSpeed's behind one interface."""
