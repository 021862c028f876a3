"""The model: frozen foundations, LoRA, the routed backbone, decoders, the network."""
